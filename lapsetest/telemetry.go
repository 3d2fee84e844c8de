package lapsetest

import (
	"context"
	"errors"
	"io"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Telemetry answers every Settings with the server's own view of them, on which
// the client's Start waits.
func (s *service) Telemetry(stream grpc.BidiStreamingServer[v2.TelemetryCommand, v2.TelemetryCommand]) error {
	b := s.b
	ctx := stream.Context()
	b.countStream(1)
	defer b.countStream(-1)
	for {
		cmd, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		answer, err, done := b.before(ctx, Telemetry, cmd)
		if err != nil {
			return err
		}
		if !done {
			if cmd.GetSettings() == nil {
				continue
			}
			answer, err = b.settle(ctx, cmd.GetSettings())
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if b.lose(Telemetry) {
				continue
			}
		}
		reply, ok := answer.(*v2.TelemetryCommand)
		if !ok || reply == nil {
			continue // a control function that chose silence
		}
		if err := stream.Send(reply); err != nil {
			return err
		}
	}
}

func (b *Broker) countStream(by int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.streams += by
	b.noteChange()
}

// settle remembers a client's settings and returns the server's answer to them.
func (b *Broker) settle(ctx context.Context, in *v2.Settings) (*v2.TelemetryCommand, error) {
	id := clientID(ctx)
	if id == "" {
		return nil, io.EOF // the real one ends the stream without a word
	}
	out := proto.CloneOf(in)
	out.Metric = nil // the client dereferences its endpoints (metric.go:341)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case in.GetPublishing() != nil:
		out.BackoffPolicy = nil
		if n := b.opts.sendAttempts; n > 0 {
			out.BackoffPolicy = producerBackoff(n)
		}
		out.GetPublishing().MaxBodySize = maxBodySize
		out.GetPublishing().ValidateMessageType = true
	case in.GetSubscription() != nil:
		g, st := b.findGroup(in.GetSubscription().GetGroup())
		if st != nil {
			return nil, status.Error(codes.InvalidArgument, "process client telemetryCommand failed. "+st.GetMessage())
		}
		out.BackoffPolicy = consumerBackoff(g.retries + 1)
		sub := out.GetSubscription()
		sub.Fifo = proto.Bool(false)
		sub.ReceiveBatchSize = proto.Int32(maxBatch)
		sub.LongPollingTimeout = durationpb.New(maxPoll)
	default:
		return nil, status.Error(codes.InvalidArgument, "there is no publishing or subscription data in settings")
	}
	b.clients[id] = proto.CloneOf(in)
	b.noteChange()
	return &v2.TelemetryCommand{
		Status:  result(v2.Code_OK, ""),
		Command: &v2.TelemetryCommand_Settings{Settings: out},
	}, nil
}

// producerBackoff is the proxy's default policy: 10 ms, doubling, at most 1 s.
func producerBackoff(attempts int) *v2.RetryPolicy {
	return &v2.RetryPolicy{
		MaxAttempts: wireInt(attempts),
		Strategy: &v2.RetryPolicy_ExponentialBackoff{ExponentialBackoff: &v2.ExponentialBackoff{
			Initial:    durationpb.New(10 * time.Millisecond),
			Max:        durationpb.New(time.Second),
			Multiplier: 2,
		}},
	}
}

// consumerBackoff is a group's default policy. SimpleConsumer does not follow it: its
// messages come again when their invisible time ends.
func consumerBackoff(attempts int) *v2.RetryPolicy {
	c := new(v2.CustomizedBackoff)
	for _, s := range []int64{1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200} {
		c.Next = append(c.Next, &durationpb.Duration{Seconds: s})
	}
	return &v2.RetryPolicy{MaxAttempts: wireInt(attempts), Strategy: &v2.RetryPolicy_CustomizedBackoff{CustomizedBackoff: c}}
}

var unknownClient = result(v2.Code_UNRECOGNIZED_CLIENT_TYPE, "cannot find client settings for this client")

// Heartbeat answers OK to a client whose settings are known, and whose group is there.
func (s *service) Heartbeat(ctx context.Context, req *v2.HeartbeatRequest) (*v2.HeartbeatResponse, error) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	settings := s.b.clients[clientID(ctx)]
	if settings == nil {
		return &v2.HeartbeatResponse{Status: unknownClient}, nil
	}
	if settings.GetSubscription() != nil {
		if _, st := s.b.findGroup(req.GetGroup()); st != nil {
			return &v2.HeartbeatResponse{Status: result(v2.Code_ILLEGAL_CONSUMER_GROUP, st.GetMessage())}, nil
		}
	}
	return &v2.HeartbeatResponse{Status: result(v2.Code_OK, "")}, nil
}

// NotifyClientTermination forgets a client.
func (s *service) NotifyClientTermination(ctx context.Context, _ *v2.NotifyClientTerminationRequest) (*v2.NotifyClientTerminationResponse, error) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	id := clientID(ctx)
	if b.clients[id] == nil {
		return &v2.NotifyClientTerminationResponse{Status: unknownClient}, nil
	}
	delete(b.clients, id)
	b.noteChange()
	return &v2.NotifyClientTerminationResponse{Status: result(v2.Code_OK, "")}, nil
}
