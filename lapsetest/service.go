package lapsetest

import (
	"context"
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // the protocol signs with HMAC-SHA1
	"encoding/hex"
	"math"
	"path"
	"regexp"
	"strings"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// service answers the calls. It is a type of its own so that the calls are not
// methods of Broker.
type service struct {
	v2.UnimplementedMessagingServiceServer
	b    *Broker
	stop <-chan struct{} // closed when the server is about to stop
}

var (
	topicName = regexp.MustCompile(`^[%|a-zA-Z0-9_-]{1,127}$`)
	groupName = regexp.MustCompile(`^[%|a-zA-Z0-9_-]{1,255}$`)
)

// result makes a status of a code; an empty text becomes the code's name.
func result(code v2.Code, text string) *v2.Status {
	if text == "" {
		text = code.String()
	}
	return &v2.Status{Code: code, Message: text}
}

// wireInt makes n what the protocol counts with. No count here comes near the limit.
func wireInt(n int) int32 { return int32(min(max(n, 0), math.MaxInt32)) }

// header returns a value of the call's metadata. The client adds its headers again
// on each retry, so that the last one is the one that counts.
func header(ctx context.Context, key string) string {
	md, _ := metadata.FromIncomingContext(ctx)
	v := md.Get(key)
	if len(v) == 0 {
		return ""
	}
	return v[len(v)-1]
}

func clientID(ctx context.Context) string { return header(ctx, "x-mq-client-id") }

// intercept is what every unary call goes through: it waits while frozen, counts,
// checks the signature, asks the control functions, and may lose the answer.
func (b *Broker) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	method := path.Base(info.FullMethod)
	answer, err, done := b.before(ctx, method, req)
	if done {
		return answer, err
	}
	answer, err = next(ctx, req)
	if b.lose(method) {
		return nil, errLost
	}
	return answer, err
}

// errLost is what the client sees of an answer that LoseNext swallowed: the same
// code as after its own timeout, without the wait.
var errLost = status.Error(codes.DeadlineExceeded, "the answer was lost")

// before does what comes before each call or, for a stream, each command.
// done means: answer or err is final.
func (b *Broker) before(ctx context.Context, method string, req any) (answer any, err error, done bool) {
	if !b.gate.pass(ctx.Done()) {
		return nil, status.FromContextError(ctx.Err()).Err(), true
	}
	b.mu.Lock()
	b.calls[method]++
	b.noteChange()
	b.mu.Unlock()
	if !b.signed(ctx) {
		return answerOf(method, result(v2.Code_UNAUTHORIZED, "the signature is missing or wrong")), nil, true
	}
	return b.ask(ctx, method, req)
}

// signed reports whether the call carries the signature that WithCredentials asks
// for: `MQv2-HMAC-SHA1 Credential=key/…, SignedHeaders=…, Signature=hex`, made over
// the date header.
func (b *Broker) signed(ctx context.Context) bool {
	if b.opts.accessKey == "" {
		return true
	}
	_, rest, ok := strings.Cut(header(ctx, "authorization"), "MQv2-HMAC-SHA1 ")
	if !ok {
		return false
	}
	fields := make(map[string]string)
	for part := range strings.SplitSeq(rest, ",") {
		k, v, _ := strings.Cut(strings.TrimSpace(part), "=")
		fields[k] = v
	}
	key, _, _ := strings.Cut(fields["Credential"], "/")
	mac := hmac.New(sha1.New, []byte(b.opts.secretKey))
	mac.Write([]byte(header(ctx, "x-mq-date-time")))
	given, err := hex.DecodeString(fields["Signature"])
	return err == nil && key == b.opts.accessKey && hmac.Equal(given, mac.Sum(nil))
}

// answerOf makes the answer of a method that says nothing but st.
func answerOf(method string, st *v2.Status) any {
	switch method {
	case QueryRoute:
		return &v2.QueryRouteResponse{Status: st}
	case Heartbeat:
		return &v2.HeartbeatResponse{Status: st}
	case SendMessage:
		return &v2.SendMessageResponse{Status: st}
	case AckMessage:
		return &v2.AckMessageResponse{Status: st}
	case ChangeInvisibleDuration:
		return &v2.ChangeInvisibleDurationResponse{Status: st}
	case RecallMessage:
		return &v2.RecallMessageResponse{Status: st}
	case NotifyClientTermination:
		return &v2.NotifyClientTerminationResponse{Status: st}
	case Telemetry:
		return &v2.TelemetryCommand{Status: st}
	default: // ReceiveMessage
		return st
	}
}

// findTopic returns a topic, or the status that says why not. The caller holds mu.
func (b *Broker) findTopic(r *v2.Resource) (*topic, *v2.Status) {
	name := nameOf(r)
	if !topicName.MatchString(name) {
		return nil, result(v2.Code_ILLEGAL_TOPIC, "the specified topic is illegal: "+name)
	}
	t, ok := b.topics[name]
	if !ok {
		return nil, result(v2.Code_TOPIC_NOT_FOUND, "no topic route info of "+name)
	}
	return t, nil
}

// findGroup returns a group, or the status that says why not. The caller holds mu.
func (b *Broker) findGroup(r *v2.Resource) (*group, *v2.Status) {
	name := nameOf(r)
	if !groupName.MatchString(name) {
		return nil, result(v2.Code_ILLEGAL_CONSUMER_GROUP, "the specified group is illegal: "+name)
	}
	g, ok := b.groups[name]
	if !ok {
		return nil, result(v2.Code_CONSUMER_GROUP_NOT_FOUND, "group not found: "+name)
	}
	return g, nil
}
