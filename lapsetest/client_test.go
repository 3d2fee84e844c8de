package lapsetest_test

import (
	"errors"
	"testing"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"

	"github.com/lapse-orders/lapse/lapsetest"
)

func startProducer(t *testing.T, endpoint string, topics ...string) golang.Producer {
	t.Helper()
	p, err := golang.NewProducer(
		&golang.Config{Endpoint: endpoint, Credentials: &credentials.SessionCredentials{}},
		golang.WithTopics(topics...), golang.WithMaxAttempts(1))
	if err != nil {
		t.Fatalf("new producer: %v", err)
	}
	if err := p.Start(); err != nil {
		t.Fatalf("start producer: %v", err)
	}
	t.Cleanup(func() {
		if err := p.GracefulStop(); err != nil {
			t.Errorf("stop producer: %v", err)
		}
	})
	return p
}

func startConsumer(t *testing.T, endpoint, group, topic string) golang.SimpleConsumer {
	t.Helper()
	c, err := golang.NewSimpleConsumer(
		&golang.Config{Endpoint: endpoint, ConsumerGroup: group, Credentials: &credentials.SessionCredentials{}},
		golang.WithSimpleAwaitDuration(5*time.Second),
		golang.WithSimpleSubscriptionExpressions(map[string]*golang.FilterExpression{topic: golang.SUB_ALL}))
	if err != nil {
		t.Fatalf("new consumer: %v", err)
	}
	if err := c.Start(); err != nil {
		t.Fatalf("start consumer: %v", err)
	}
	t.Cleanup(func() {
		if err := c.GracefulStop(); err != nil {
			t.Errorf("stop consumer: %v", err)
		}
	})
	return c
}

func TestOfficialClientSendsReceivesAndAcksATimedMessage(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t)
	b.CreateTopic("order-timeout", lapsetest.Delay, 8)
	b.CreateGroup("cg", 16)
	p := startProducer(t, b.Endpoint(), "order-timeout")
	c := startConsumer(t, b.Endpoint(), "cg", "order-timeout")

	due := time.Now().Add(1500 * time.Millisecond).Truncate(time.Millisecond)
	m := &golang.Message{Topic: "order-timeout", Body: []byte("body")}
	m.SetKeys("1", "2")
	m.AddProperty("traceparent", "00-aa")
	m.SetDelayTimestamp(due)
	receipts, err := p.Send(t.Context(), m)
	if err != nil {
		t.Fatalf("send: %v", err)
	}
	if len(receipts) != 1 || receipts[0].MessageID == "" || receipts[0].RecallHandle == "" {
		t.Fatalf("receipts %+v: want one with message id and recall handle", receipts)
	}
	if n := len(b.Pending("order-timeout")); n != 1 {
		t.Fatalf("%d messages pending, want 1", n)
	}
	got, err := c.Receive(within(t, 20*time.Second), 32, 10*time.Second)
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	if early := due.Sub(time.Now()); early > 0 {
		t.Errorf("the message came %v early", early)
	}
	if len(got) != 1 {
		t.Fatalf("received %d messages, want 1", len(got))
	}
	v := got[0]
	if v.GetMessageId() != receipts[0].MessageID || string(v.GetBody()) != "body" || len(v.GetKeys()) != 2 ||
		v.GetProperties()["traceparent"] != "00-aa" || v.GetDeliveryAttempt() != 1 || !v.GetDeliveryTimestamp().Equal(due) {
		t.Errorf("received %+v", v)
	}
	if n := len(b.InFlight("cg")); n != 1 {
		t.Errorf("%d messages in flight, want 1", n)
	}
	if err := c.ChangeInvisibleDuration(v, time.Minute); err != nil {
		t.Fatalf("change invisible duration: %v", err)
	}
	if err := c.Ack(t.Context(), v); err != nil {
		t.Fatalf("ack: %v", err)
	}
	if acked := b.Acked("cg"); len(acked) != 1 || acked[0].ID != v.GetMessageId() || acked[0].Attempt != 1 {
		t.Errorf("acked %+v", acked)
	}
	if n := len(b.InFlight("cg")); n != 0 {
		t.Errorf("%d messages in flight after the ack, want 0", n)
	}
	// The first heartbeat comes a second after the start.
	until(t, b, "heartbeats of both clients", func() bool { return b.Calls(lapsetest.Heartbeat) >= 2 })
}

func TestOfficialClientGetsTheCodeOfARefusal(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t)
	b.CreateTopic("t", lapsetest.Delay, 1)
	p := startProducer(t, b.Endpoint(), "t")
	m := &golang.Message{Topic: "t", Body: []byte("x")}
	m.SetDelayTimestamp(time.Now().Add(25 * time.Hour))
	_, err := p.Send(t.Context(), m)
	var refused *golang.ErrRpcStatus
	if !errors.As(err, &refused) || refused.GetCode() != int32(v2.Code_ILLEGAL_DELIVERY_TIME) {
		t.Fatalf("send 25 h ahead: %v, want code 40012", err)
	}
}
