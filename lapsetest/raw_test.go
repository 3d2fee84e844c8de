package lapsetest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// raw is a client on the generated stubs: it sees every code, and has no habits.
type raw struct {
	t      *testing.T
	api    v2.MessagingServiceClient
	id     string
	stream v2.MessagingService_TelemetryClient
}

var rawCount atomic.Int64

const requestTimeout = 3 * time.Second

func dialRaw(t *testing.T, endpoint string, opts ...grpc.DialOption) *raw {
	t.Helper()
	if len(opts) == 0 {
		opts = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	}
	c, err := grpc.NewClient(endpoint, opts...)
	if err != nil {
		t.Fatalf("dial %s: %v", endpoint, err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close connection: %v", err)
		}
	})
	return &raw{t: t, api: v2.NewMessagingServiceClient(c), id: fmt.Sprintf("raw-%d-%d", time.Now().UnixNano(), rawCount.Add(1))}
}

// sign adds the headers that the official client sends.
func (r *raw) sign(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx,
		"x-mq-client-id", r.id,
		"x-mq-language", "GO",
		"x-mq-protocol", "v2",
		"x-mq-client-version", "5.1.4",
		"x-mq-namespace", "",
		"x-mq-request-id", fmt.Sprint(rawCount.Add(1)),
		"x-mq-date-time", time.Now().Format("20060102T150405Z"))
}

func (r *raw) ctx(d time.Duration) context.Context {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	r.t.Cleanup(cancel)
	return r.sign(ctx)
}

func res(name string) *v2.Resource { return &v2.Resource{Name: name} }

// settle opens the telemetry stream if need be, sends settings, and returns the
// server's.
func (r *raw) settle(s *v2.Settings) (*v2.Settings, error) {
	r.t.Helper()
	if r.stream == nil {
		ctx, cancel := context.WithCancel(context.Background())
		r.t.Cleanup(cancel)
		stream, err := r.api.Telemetry(r.sign(ctx))
		if err != nil {
			return nil, err
		}
		r.stream = stream
	}
	s.RequestTimeout = durationpb.New(requestTimeout)
	s.UserAgent = &v2.UA{Language: v2.Language_GOLANG, Version: "5.1.4", Platform: "linux", Hostname: "test"}
	s.AccessPoint = &v2.Endpoints{Scheme: v2.AddressScheme_IPv4, Addresses: []*v2.Address{{Host: "127.0.0.1", Port: 8081}}}
	if err := r.stream.Send(&v2.TelemetryCommand{Command: &v2.TelemetryCommand_Settings{Settings: s}}); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	for {
		cmd, err := r.stream.Recv()
		if err != nil {
			return nil, err
		}
		if cmd.GetSettings() != nil {
			return cmd.GetSettings(), nil
		}
	}
}

func producerSettings(topics ...string) *v2.Settings {
	p := new(v2.Publishing)
	for _, t := range topics {
		p.Topics = append(p.Topics, res(t))
	}
	return &v2.Settings{ClientType: v2.ClientType_PRODUCER.Enum(), PubSub: &v2.Settings_Publishing{Publishing: p}}
}

func consumerSettings(group, topic string) *v2.Settings {
	return &v2.Settings{ClientType: v2.ClientType_SIMPLE_CONSUMER.Enum(), PubSub: &v2.Settings_Subscription{Subscription: &v2.Subscription{
		Group:              res(group),
		Subscriptions:      []*v2.SubscriptionEntry{{Topic: res(topic), Expression: &v2.FilterExpression{Type: v2.FilterType_TAG, Expression: "*"}}},
		LongPollingTimeout: durationpb.New(5 * time.Second),
	}}}
}

func (r *raw) mustSettle(s *v2.Settings) *v2.Settings {
	r.t.Helper()
	out, err := r.settle(s)
	if err != nil {
		r.t.Fatalf("settings: %v", err)
	}
	return out
}

func (r *raw) route(topic string) *v2.QueryRouteResponse {
	r.t.Helper()
	out, err := r.api.QueryRoute(r.ctx(requestTimeout), &v2.QueryRouteRequest{
		Topic:     res(topic),
		Endpoints: &v2.Endpoints{Scheme: v2.AddressScheme_IPv4, Addresses: []*v2.Address{{Host: "127.0.0.1", Port: 8081}}},
	})
	if err != nil {
		r.t.Fatalf("query route of %s: %v", topic, err)
	}
	return out
}

// newMessage returns a message with a fresh id; a zero due makes it an ordinary one.
func newMessage(topic, body string, due time.Time) *v2.Message {
	sys := &v2.SystemProperties{
		MessageId:     fmt.Sprintf("01%032X", time.Now().UnixNano()+rawCount.Add(1)),
		BornTimestamp: timestamppb.Now(),
		BornHost:      "test",
		BodyEncoding:  v2.Encoding_IDENTITY,
		MessageType:   v2.MessageType_NORMAL,
	}
	if !due.IsZero() {
		sys.MessageType = v2.MessageType_DELAY
		sys.DeliveryTimestamp = timestamppb.New(due)
	}
	return &v2.Message{Topic: res(topic), Body: []byte(body), SystemProperties: sys}
}

func (r *raw) send(msgs ...*v2.Message) *v2.SendMessageResponse {
	r.t.Helper()
	out, err := r.api.SendMessage(r.ctx(10*time.Second), &v2.SendMessageRequest{Messages: msgs})
	if err != nil {
		r.t.Fatalf("send: %v", err)
	}
	return out
}

func (r *raw) mustSend(msgs ...*v2.Message) *v2.SendMessageResponse {
	r.t.Helper()
	out := r.send(msgs...)
	if out.GetStatus().GetCode() != v2.Code_OK {
		r.t.Fatalf("send: %v", out.GetStatus())
	}
	return out
}

type receipt struct {
	code     v2.Code
	text     string
	messages []*v2.Message
	statuses int
}

// receive makes one Receive with a deadline of d.
func (r *raw) receive(group, topic string, batch int, invisible, d time.Duration) receipt {
	r.t.Helper()
	out, err := r.tryReceive(r.ctx(d), group, topic, batch, invisible)
	if err != nil {
		r.t.Fatalf("receive: %v", err)
	}
	return out
}

func (r *raw) tryReceive(ctx context.Context, group, topic string, batch int, invisible time.Duration) (receipt, error) {
	return r.tryReceiveTag(ctx, group, topic, batch, invisible, "*")
}

func (r *raw) tryReceiveTag(ctx context.Context, group, topic string, batch int, invisible time.Duration, tags string) (receipt, error) {
	var out receipt
	req := receiveRequest(group, topic, batch)
	req.FilterExpression.Expression = tags
	req.InvisibleDuration = durationpb.New(invisible)
	stream, err := r.api.ReceiveMessage(ctx, req)
	if err != nil {
		return out, err
	}
	for {
		frame, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		if st := frame.GetStatus(); st != nil {
			out.code, out.text = st.GetCode(), st.GetMessage()
			out.statuses++
		}
		if m := frame.GetMessage(); m != nil {
			out.messages = append(out.messages, m)
		}
	}
}

// next receives until one message is there, for at most d.
func (r *raw) next(group, topic string, invisible, d time.Duration) *v2.Message {
	r.t.Helper()
	for limit := time.Now().Add(d); time.Now().Before(limit); {
		got := r.receive(group, topic, 1, invisible, 10*time.Second)
		if got.code != v2.Code_OK && got.code != v2.Code_MESSAGE_NOT_FOUND {
			r.t.Fatalf("receive: %v %s", got.code, got.text)
		}
		if len(got.messages) > 0 {
			return got.messages[0]
		}
	}
	r.t.Fatalf("no message within %v", d)
	return nil
}

func (r *raw) ack(group, topic, handle string) v2.Code {
	r.t.Helper()
	out, err := r.api.AckMessage(r.ctx(requestTimeout), &v2.AckMessageRequest{
		Group: res(group), Topic: res(topic),
		Entries: []*v2.AckMessageEntry{{MessageId: "id", ReceiptHandle: handle}},
	})
	if err != nil {
		r.t.Fatalf("ack: %v", err)
	}
	if n := len(out.GetEntries()); out.GetStatus().GetCode() == v2.Code_OK && n != 1 {
		r.t.Errorf("ack answered with %d entries, want 1", n)
	}
	return out.GetStatus().GetCode()
}

func (r *raw) hide(group, topic, handle string, d time.Duration) (v2.Code, string) {
	r.t.Helper()
	out, err := r.api.ChangeInvisibleDuration(r.ctx(requestTimeout), &v2.ChangeInvisibleDurationRequest{
		Group: res(group), Topic: res(topic), ReceiptHandle: handle, MessageId: "id", InvisibleDuration: durationpb.New(d),
	})
	if err != nil {
		r.t.Fatalf("change invisible duration: %v", err)
	}
	return out.GetStatus().GetCode(), out.GetReceiptHandle()
}

func (r *raw) heartbeat(group string) v2.Code {
	r.t.Helper()
	req := &v2.HeartbeatRequest{ClientType: v2.ClientType_PRODUCER}
	if group != "" {
		req = &v2.HeartbeatRequest{ClientType: v2.ClientType_SIMPLE_CONSUMER, Group: res(group)}
	}
	out, err := r.api.Heartbeat(r.ctx(requestTimeout), req)
	if err != nil {
		r.t.Fatalf("heartbeat: %v", err)
	}
	return out.GetStatus().GetCode()
}

func handleOf(m *v2.Message) string { return m.GetSystemProperties().GetReceiptHandle() }
func idOf(m *v2.Message) string     { return m.GetSystemProperties().GetMessageId() }
func attemptOf(m *v2.Message) int32 { return m.GetSystemProperties().GetDeliveryAttempt() }

func receiveRequest(group, topic string, batch int) *v2.ReceiveMessageRequest {
	return &v2.ReceiveMessageRequest{
		Group:             res(group),
		MessageQueue:      &v2.MessageQueue{Topic: res(topic), Broker: &v2.Broker{}},
		FilterExpression:  &v2.FilterExpression{Type: v2.FilterType_TAG, Expression: "*"},
		BatchSize:         int32(batch),
		InvisibleDuration: durationpb.New(10 * time.Second),
	}
}
