package rmq

import (
	"context"
	"errors"
	"fmt"
	"strings"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var (
	// ErrNotReady is returned by Send, Receive, Ack and ChangeInvisible until the
	// first connection is complete. It wraps the last cause, as Ready gives it.
	ErrNotReady = errors.New("rocketmq is not ready")
	// ErrClosed is returned by every call after Close.
	ErrClosed = errors.New("rocketmq client is closed")
	// ErrHandleExpired is returned by Ack and ChangeInvisible when the invisible
	// time had ended before (40013): the message is delivered again.
	ErrHandleExpired = errors.New("receipt handle has expired")
)

// StatusError is a refusal by the server.
type StatusError struct {
	Code    int32 // of the enumeration Code of the RocketMQ 5 protocol, such as 40012
	Message string
}

// Error names the code by number and, where it is known, by name.
func (e *StatusError) Error() string {
	if name, ok := v2.Code_name[e.Code]; ok {
		return fmt.Sprintf("code %d %s: %s", e.Code, name, e.Message)
	}
	return fmt.Sprintf("code %d: %s", e.Code, e.Message)
}

// Is makes errors.Is(err, ErrHandleExpired) true for 40013.
func (e *StatusError) Is(target error) bool {
	return target == ErrHandleExpired && e.Code == int32(v2.Code_INVALID_RECEIPT_HANDLE)
}

// refusal makes the error of a status. Of the message only the first line is kept,
// the broker's go on with advertisement for its documentation.
func refusal(code int32, message string) *StatusError {
	first, _, _ := strings.Cut(message, "\n")
	return &StatusError{Code: code, Message: strings.TrimSpace(first)}
}

// Code returns the server's code of a refusal; ok is false when err is not one.
func Code(err error) (code int32, ok bool) {
	if se, found := errors.AsType[*StatusError](err); found {
		return se.Code, true
	}
	return 0, false
}

// IsRefusedMessage says that the server refuses this one message for what it is,
// so that sending it again cannot succeed: a delivery time too far away, a body
// too large or empty, properties or keys too large or malformed.
func IsRefusedMessage(err error) bool {
	code, ok := Code(err)
	if !ok {
		return false
	}
	switch v2.Code(code) {
	case v2.Code_ILLEGAL_DELIVERY_TIME,
		v2.Code_ILLEGAL_MESSAGE_TAG,
		v2.Code_ILLEGAL_MESSAGE_KEY,
		v2.Code_ILLEGAL_MESSAGE_PROPERTY_KEY,
		v2.Code_MESSAGE_PROPERTIES_TOO_LARGE:
		return true
	}
	return code/100 == 413
}

// IsFlowControl says that the broker asks for less: 42900, and 50001, which is
// what a broker behind a local proxy answers in the same case. Back off.
func IsFlowControl(err error) bool {
	code, ok := Code(err)
	return ok && (v2.Code(code) == v2.Code_TOO_MANY_REQUESTS || v2.Code(code) == v2.Code_INTERNAL_SERVER_ERROR)
}

// IsUnavailable says that no server answered: not ready, connection lost, no
// reply in time. A message whose Send ended so may have been stored.
func IsUnavailable(err error) bool {
	if errors.Is(err, ErrNotReady) || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	switch transportCode(err) {
	// Canceled: the connection was replaced under the call. When its caller gave it
	// up, the error is the context's.
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return true
	}
	return false
}

// transportCode is the gRPC code of an error that no server answered, codes.OK
// otherwise.
func transportCode(err error) codes.Code {
	type grpcStatus interface{ GRPCStatus() *status.Status }
	var gs grpcStatus
	if errors.As(err, &gs) {
		return gs.GRPCStatus().Code()
	}
	return codes.OK
}

// edge turns an error of the official client into one of ours. When ctx has
// ended, that is the reason, whatever the client says (simple_consumer.go:249
// returns a bare string).
func edge(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if rs, ok := errors.AsType[*golang.ErrRpcStatus](err); ok {
		return refusal(rs.Code, rs.Message)
	}
	if cause := ctx.Err(); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%v)", cause, err) //nolint:errorlint // the client's text is an addition to the cause
	}
	return err
}

// recovered turns a panic of the official client into an error: it dereferences
// what a damaged reply leaves out (message.go:283, metric.go:341), and a consumer
// must not end for that.
func recovered(what string, err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%s: the rocketmq client panicked: %v", what, p)
	}
}
