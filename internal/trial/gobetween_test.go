package trial

import (
	"context"
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // the protocol signs with HMAC-SHA1
	"encoding/hex"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/orders"
)

// between is a go-between before an embedded endpoint, and a client that knows only the go-between.
type between struct {
	*goBetween
	broker *lapsetest.Broker
	client v2.MessagingServiceClient
	ctx    context.Context
	t      *testing.T
}

const timedTopic = "order-timeout"

func newBetween(t *testing.T, share float64, seed uint64, cfg rmq.Config, opts ...lapsetest.Option) *between {
	t.Helper()
	b := &between{broker: lapsetest.Start(t, opts...), t: t}
	b.broker.CreateTopic(timedTopic, lapsetest.Delay, 8)
	b.broker.CreateTopic("events", lapsetest.Normal, 8)
	cfg.Endpoints = b.broker.Endpoint()
	if pem := b.broker.CertPEM(); pem != nil {
		cfg.TLS.CAFile = filepath.Join(t.TempDir(), "ca.pem")
		if err := os.WriteFile(cfg.TLS.CAFile, pem, 0o600); err != nil {
			t.Fatal(err)
		}
	} else {
		cfg.TLS.Disabled = true
	}
	var err error
	if b.goBetween, err = startGoBetween(t.Context(), cfg, timedTopic, share, seed); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	conn, err := grpc.NewClient(b.endpoint(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	b.client = v2.NewMessagingServiceClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	b.ctx = metadata.AppendToOutgoingContext(ctx, "x-mq-client-id", "client-1")
	return b
}

// send sends a message with one order of a number, and gives the answer's code and message id.
func (b *between) send(topic string, number int64) (v2.Code, string) {
	b.t.Helper()
	due := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	body, err := orders.EncodeExpiry(orders.Expiry{Due: due, Orders: []string{orders.FormatID(number)}})
	if err != nil {
		b.t.Fatal(err)
	}
	system := &v2.SystemProperties{MessageId: fmt.Sprintf("message-%d", number), MessageType: v2.MessageType_NORMAL}
	if topic == timedTopic {
		system.MessageType, system.DeliveryTimestamp = v2.MessageType_DELAY, timestamppb.New(due)
	}
	answer, err := b.client.SendMessage(b.ctx, &v2.SendMessageRequest{Messages: []*v2.Message{{Topic: &v2.Resource{Name: topic}, SystemProperties: system, Body: body}}})
	if err != nil {
		b.t.Fatal(err)
	}
	if answer.GetStatus().GetCode() != v2.Code_OK {
		return answer.GetStatus().GetCode(), ""
	}
	if n := len(answer.GetEntries()); n != 1 || answer.GetEntries()[0].GetStatus().GetCode() != v2.Code_OK {
		b.t.Fatalf("answer %v", answer)
	}
	return v2.Code_OK, answer.GetEntries()[0].GetMessageId()
}

// stored gives the messages that the real endpoint has, by their orders.
func (b *between) stored(topic string) map[int64]bool {
	b.t.Helper()
	all := map[int64]bool{}
	for _, m := range b.broker.Sent(topic) {
		e, err := orders.DecodeExpiry(m.Body)
		if err != nil {
			b.t.Fatal(err)
		}
		for _, text := range e.Orders {
			id, err := orders.ParseID(text)
			if err != nil {
				b.t.Fatal(err)
			}
			all[id] = true
		}
	}
	return all
}

func TestTheGoBetweenLosesItsShareOfTheTimedMessagesAndKnowsWhich(t *testing.T) {
	t.Parallel()
	for _, share := range []float64{0.05, 0.3, 0.9, 1} {
		b := newBetween(t, share, 1, rmq.Config{})
		const messages = 200
		for n := range int64(messages) {
			if code, id := b.send(timedTopic, n+1); code != v2.Code_OK || id != fmt.Sprintf("message-%d", n+1) {
				t.Fatalf("message %d: %s, id %q", n+1, code, id)
			}
		}
		stored, loss := b.stored(timedTopic), b.loss()
		if want := share * messages; math.Abs(float64(loss.Lost)-want) > 1 || loss.Messages != messages {
			t.Errorf("a share of %g: lost %d of %d", share, loss.Lost, loss.Messages)
		}
		for n := int64(1); n <= messages; n++ {
			if stored[n] == loss.Orders[n] {
				t.Errorf("a share of %g: order %d stored %t, lost %t", share, n, stored[n], loss.Orders[n])
			}
		}
		if len(loss.Orders) != loss.Lost {
			t.Errorf("%d orders in %d lost messages of one each", len(loss.Orders), loss.Lost)
		}
	}
}

func TestEachTwentyMessagesOfAGoBetweenHaveOneLossAtAPlaceOfTheSeed(t *testing.T) {
	t.Parallel()
	places := func(seed uint64) (lost []int) {
		b := newBetween(t, 0.05, seed, rmq.Config{})
		for n := range int64(200) {
			b.send(timedTopic, n+1)
			if b.loss().Orders[n+1] {
				lost = append(lost, int(n))
			}
		}
		return lost
	}
	first := places(7)
	for i, place := range first {
		if place/20 != i {
			t.Errorf("loss %d is message %d", i, place)
		}
	}
	if len(first) != 10 {
		t.Errorf("losses at %v, want ten", first)
	}
	if again := places(7); fmt.Sprint(again) != fmt.Sprint(first) {
		t.Errorf("the same seed lost %v, then %v", first, again)
	}
	if other := places(8); fmt.Sprint(other) == fmt.Sprint(first) {
		t.Errorf("another seed lost the same: %v", first)
	}
}

func TestAnOrderWithALaterMessageIsNotLostAnyMore(t *testing.T) {
	t.Parallel()
	b := newBetween(t, 0.5, 1, rmq.Config{})
	order := int64(1)
	for b.send(timedTopic, order); !b.loss().Orders[order]; b.send(timedTopic, order) {
		order++
	}
	b.broker.FailNext(lapsetest.SendMessage, 1, v2.Code_TOO_MANY_REQUESTS)
	for code := v2.Code_OK; code == v2.Code_OK; {
		code, _ = b.send(timedTopic, order)
	}
	if !b.loss().Orders[order] {
		t.Error("a message that the server refused counts as one that got through")
	}
	for !b.stored(timedTopic)[order] {
		b.send(timedTopic, order)
	}
	if lost, noted := b.loss().Orders[order]; lost || !noted {
		t.Errorf("order %d got a message through: lost %t, noted %t", order, lost, noted)
	}
}

func TestOtherTopicsLoseNothing(t *testing.T) {
	t.Parallel()
	b := newBetween(t, 1, 1, rmq.Config{})
	for n := range int64(20) {
		b.send("events", n+1)
	}
	if n, loss := len(b.stored("events")), b.loss(); n != 20 || loss.Lost != 0 || loss.Messages != 0 {
		t.Errorf("%d stored, %+v", n, loss)
	}
}

func TestTheRouteOfAGoBetweenLeadsBackToIt(t *testing.T) {
	t.Parallel()
	b := newBetween(t, 0.05, 1, rmq.Config{})
	route, err := b.client.QueryRoute(b.ctx, &v2.QueryRouteRequest{Topic: &v2.Resource{Name: timedTopic}})
	if err != nil {
		t.Fatal(err)
	}
	if len(route.GetMessageQueues()) != 8 {
		t.Fatalf("%v", route)
	}
	for _, q := range route.GetMessageQueues() {
		addresses := q.GetBroker().GetEndpoints().GetAddresses()
		if len(addresses) != 1 || fmt.Sprintf("%s:%d", addresses[0].GetHost(), addresses[0].GetPort()) != b.endpoint() {
			t.Errorf("the route leads to %v, not to %s", addresses, b.endpoint())
		}
		if q.GetBroker().GetName() == "" || q.GetAcceptMessageTypes()[0] != v2.MessageType_DELAY {
			t.Errorf("the rest of the route is gone: %v", q)
		}
	}
	missing, err := b.client.QueryRoute(b.ctx, &v2.QueryRouteRequest{Topic: &v2.Resource{Name: "nothing"}})
	if err != nil || missing.GetStatus().GetCode() != v2.Code_TOPIC_NOT_FOUND {
		t.Errorf("of a topic that is not there: %v, %v", missing, err)
	}
}

func TestTelemetryAndHeartbeatsPassTheGoBetween(t *testing.T) {
	t.Parallel()
	b := newBetween(t, 0.05, 1, rmq.Config{})
	heartbeat := func() v2.Code {
		t.Helper()
		answer, err := b.client.Heartbeat(b.ctx, &v2.HeartbeatRequest{ClientType: v2.ClientType_PRODUCER})
		if err != nil {
			t.Fatal(err)
		}
		return answer.GetStatus().GetCode()
	}
	if code := heartbeat(); code != v2.Code_UNRECOGNIZED_CLIENT_TYPE {
		t.Errorf("before the settings: %s", code)
	}
	stream, err := b.client.Telemetry(b.ctx)
	if err != nil {
		t.Fatal(err)
	}
	settings := &v2.Settings{PubSub: &v2.Settings_Publishing{Publishing: &v2.Publishing{Topics: []*v2.Resource{{Name: timedTopic}}}}}
	if err := stream.Send(&v2.TelemetryCommand{Command: &v2.TelemetryCommand_Settings{Settings: settings}}); err != nil {
		t.Fatal(err)
	}
	answer, err := stream.Recv()
	if err != nil || answer.GetSettings().GetPublishing().GetMaxBodySize() == 0 {
		t.Fatalf("no settings of the server: %v, %v", answer, err)
	}
	if code := heartbeat(); code != v2.Code_OK {
		t.Errorf("after the settings: %s", code)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if cmd, err := stream.Recv(); err == nil {
		t.Errorf("after its end the stream says %v", cmd)
	}
	eventually(t, 20*time.Second, "the stream to the server has ended", func() bool { return b.broker.Streams() == 0 })
	if _, err := b.client.NotifyClientTermination(b.ctx, &v2.NotifyClientTerminationRequest{}); err != nil {
		t.Fatal(err)
	}
	if clients := b.broker.Clients(); len(clients) != 0 {
		t.Errorf("the server still knows %v", clients)
	}
}

func TestAStreamEndsWhenTheRealProxyDoes(t *testing.T) {
	t.Parallel()
	b := newBetween(t, 0.05, 1, rmq.Config{})
	stream, err := b.client.Telemetry(b.ctx)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "the stream reaches the server", func() bool { return b.broker.Streams() == 1 })
	b.broker.Stop()
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the stream ended with %v", err)
	}
	if err := b.broker.Resume(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "calls pass again", func() bool {
		_, err := b.client.Heartbeat(b.ctx, &v2.HeartbeatRequest{ClientType: v2.ClientType_PRODUCER})
		return err == nil
	})
}

func TestTheGoBetweenUsesTheTLSOfTheRealProxyAndTheSignatureOfTheClient(t *testing.T) {
	t.Parallel()
	b := newBetween(t, 0.01, 1, rmq.Config{}, lapsetest.WithTLS(), lapsetest.WithCredentials("key", "secret"))
	// What the header is made of is the client's business: that it arrives unchanged is seen in the server's answer to a wrong one.
	ctx := metadata.AppendToOutgoingContext(b.ctx, "authorization", "MQv2-HMAC-SHA1 Credential=key, SignedHeaders=x-mq-date-time, Signature=8b3a", "x-mq-date-time", "now")
	answer, err := b.client.QueryRoute(ctx, &v2.QueryRouteRequest{Topic: &v2.Resource{Name: timedTopic}})
	if err != nil || answer.GetStatus().GetCode() != v2.Code_UNAUTHORIZED {
		t.Errorf("a wrong signature: %v, %v", answer, err)
	}
	mac := hmac.New(sha1.New, []byte("secret"))
	mac.Write([]byte("now"))
	ctx = metadata.AppendToOutgoingContext(b.ctx, "authorization", "MQv2-HMAC-SHA1 Credential=key, SignedHeaders=x-mq-date-time, Signature="+hex.EncodeToString(mac.Sum(nil)), "x-mq-date-time", "now")
	answer, err = b.client.QueryRoute(ctx, &v2.QueryRouteRequest{Topic: &v2.Resource{Name: timedTopic}})
	if err != nil || answer.GetStatus().GetCode() != v2.Code_OK {
		t.Errorf("a right one: %v, %v", answer, err)
	}
}
