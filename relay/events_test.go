package relay_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/relay"
)

const eventTopic = "order-events"

// eventSetup is a store that tells of every change, and an embedded broker with a topic for it.
func eventSetup(t *testing.T, opts ...lapsetest.Option) *bundle {
	t.Helper()
	b := &bundle{db: mysqltest.New(t)}
	b.store = openStore(t, b.db.DSN, orders.Config{Events: true})
	b.broker = lapsetest.Start(t, opts...)
	b.broker.CreateTopic(eventTopic, lapsetest.Normal, 8)
	return b
}

func (b *bundle) eventSender(t *testing.T) relay.Sender {
	t.Helper()
	return openEventSender(t, b.broker.Endpoint(), eventTopic)
}

func openEventSender(t *testing.T, endpoints, topic string) relay.Sender {
	t.Helper()
	p, err := relay.OpenEventSender(relay.RocketMQ{Endpoints: endpoints, TLS: rmq.TLS{Disabled: true}}, topic)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Errorf("close the sender: %v", err)
		}
	})
	return p
}

// runningEvents is a relay of events that runs until stop, or until the test ends.
type runningEvents struct {
	*relay.Events
	stop func()
	reg  *prometheus.Registry
}

func startEvents(t *testing.T, store relay.EventOutbox, sender relay.Sender, cfg relay.EventsConfig) *runningEvents {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	cfg.Registerer, cfg.Logger = reg, testLog(t)
	r, err := relay.NewEvents(store, sender, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() { // ended by stop
		defer close(ended)
		if err := r.Run(ctx); err != nil {
			t.Errorf("run the relay of events: %v", err)
		}
	}()
	stop := sync.OnceFunc(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(limit):
			t.Errorf("the relay of events did not stop within %s", limit)
		}
	})
	t.Cleanup(stop)
	return &runningEvents{Events: r, stop: stop, reg: reg}
}

// metric sums what a metric has over its labels.
func (r *runningEvents) metric(t *testing.T, name string) (sum float64) {
	t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "lapse_events_"+name {
			continue
		}
		for _, m := range f.GetMetric() {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
		return sum
	}
	t.Fatalf("no metric lapse_events_%s", name)
	return 0
}

// awaitEvents waits until so many rows are in a state.
func (b *bundle) awaitEvents(t *testing.T, state string, n int64) {
	t.Helper()
	var got int64
	eventually(t, "events "+state, func() bool {
		got = b.db.Int(t, "SELECT COUNT(*) FROM event_outbox WHERE state = ?", state)
		return got == n
	}, func() any { return got })
}

func (b *bundle) pay(t *testing.T, o orders.Order) {
	t.Helper()
	r, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: "bank", TransactionID: orders.FormatID(o.ID), OrderID: o.ID, Currency: o.Currency, Amount: o.Amount})
	if err != nil || r.Outcome != orders.PaymentAccepted {
		t.Fatalf("pay order %d: %+v, %v", o.ID, r, err)
	}
}

// attributes are what the tests look at of a CloudEvent.
type attributes struct {
	SpecVersion, ID, Source, Type, Subject, Sequence string
	Data                                             struct {
		OrderID string `json:"order_id"`
	}
}

func attributesOf(t *testing.T, body []byte) attributes {
	t.Helper()
	var a attributes
	if err := json.Unmarshal(body, &a); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	return a
}

// toldIDs are the ids of the events that the embedded broker has accepted, in that order, repeated ones included.
func (b *bundle) toldIDs(t *testing.T) []string {
	t.Helper()
	ids := []string{}
	for _, m := range b.broker.Sent(eventTopic) {
		ids = append(ids, attributesOf(t, m.Body).ID)
	}
	return ids
}

func TestRealBrokerDeliversEveryChangeOfAnOrder(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	b := &bundle{db: mysqltest.New(t)}
	b.store = openStore(t, b.db.DSN, orders.Config{Events: true})
	topic := broker.NewTopic(t, admin.Normal)
	want := map[string]string{}
	expect := func(o orders.Order, kinds ...string) {
		for i, kind := range kinds {
			want[fmt.Sprintf("%d-%d", o.ID, i+1)] = kind
		}
	}
	for range 20 {
		paid, cancelled, open := b.place(t, orders.NewOrder{}), b.place(t, orders.NewOrder{DeadlineAt: time.Now().Add(-time.Second)}), b.place(t, orders.NewOrder{})
		b.pay(t, paid)
		b.cancelDue(t, orders.FormatID(cancelled.ID))
		if _, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: "bank", TransactionID: "late-" + orders.FormatID(cancelled.ID), OrderID: cancelled.ID, Currency: "EUR", Amount: 100}); err != nil {
			t.Fatal(err)
		}
		expect(paid, orders.OutgoingPlaced, orders.OutgoingPaid)
		expect(cancelled, orders.OutgoingPlaced, orders.OutgoingCancelled, orders.OutgoingRefundDone)
		expect(open, orders.OutgoingPlaced)
	}
	claim, err := b.store.ClaimRefunds(t.Context(), "bank", 100, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for _, refund := range claim.Rows {
		if done, err := b.store.RefundDone(t.Context(), claim.Token, refund, "R"); err != nil || !done {
			t.Fatalf("refund: %t, %v", done, err)
		}
	}
	r := startEvents(t, b.store, openEventSender(t, broker.Endpoints, topic), relay.EventsConfig{Topic: topic, Source: "/shop"})
	b.awaitEvents(t, "sent", int64(len(want)))
	if n := r.metric(t, "sent_total"); n != float64(len(want)) {
		t.Errorf("%v events are counted, want %d", n, len(want))
	}

	got := map[string]string{}
	c, err := rmq.NewConsumer(rmq.Config{Endpoints: broker.Endpoints, TLS: rmq.TLS{Disabled: true}, TopicType: rmq.TopicNormal}, broker.NewGroup(t, 16), topic)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Errorf("close the consumer: %v", err)
		}
	}()
	eventually(t, "the consumer is ready", func() bool { return c.Ready() == nil }, func() any { return c.Ready() })
	ctx, cancel := context.WithTimeout(t.Context(), 2*limit)
	defer cancel()
	for len(got) < len(want) {
		ds, err := c.Receive(ctx, 32, 30*time.Second)
		if ctx.Err() != nil {
			t.Fatalf("%d of %d events came, the last error: %v", len(got), len(want), err)
		}
		for _, d := range ds {
			a := attributesOf(t, d.Body)
			got[a.ID] = a.Type
			if a.SpecVersion != "1.0" || a.Source != "/shop" || a.Subject != a.Data.OrderID || !slices.Equal(d.Keys, []string{a.Subject}) || !strings.HasPrefix(a.ID, a.Subject+"-") ||
				fmt.Sprintf("%s-%s", a.Subject, strings.TrimLeft(a.Sequence, "0")) != a.ID || d.Properties["content-type"] != orders.OutgoingContentType || !d.DeliverAt.IsZero() {
				t.Errorf("%+v with keys %v, properties %v", a, d.Keys, d.Properties)
			}
			if err := c.Ack(ctx, d); err != nil {
				t.Errorf("ack: %v", err)
			}
		}
	}
	for id, kind := range want {
		if got[id] != kind {
			t.Errorf("event %s is %q, want %q", id, got[id], kind)
		}
	}
}

// killedBeforeMark is a store whose relay dies when it has sent and not marked.
type killedBeforeMark struct {
	*orders.Store
	sent chan struct{}
	once sync.Once
}

func (k *killedBeforeMark) MarkOutgoingSent(ctx context.Context, _ string, _ []orders.SentOutgoing) (int, error) {
	k.once.Do(func() { close(k.sent) })
	<-ctx.Done()
	return 0, ctx.Err()
}

func TestEventsAreSentAgainWhenARelayDiesBetweenSendAndMark(t *testing.T) {
	t.Parallel()
	b := eventSetup(t)
	o, other := b.place(t, orders.NewOrder{}), b.place(t, orders.NewOrder{})
	b.pay(t, o)
	dying := &killedBeforeMark{Store: b.store, sent: make(chan struct{})}
	first := startEvents(t, dying, b.eventSender(t), relay.EventsConfig{Lease: 3 * time.Second, SendTimeout: time.Second, StopTimeout: 10 * time.Millisecond})
	select {
	case <-dying.sent:
	case <-time.After(limit):
		t.Fatal("the first relay sends nothing")
	}
	first.stop()
	startEvents(t, b.store, b.eventSender(t), relay.EventsConfig{})
	b.awaitEvents(t, "sent", 3)
	times := map[string]int{}
	for _, id := range b.toldIDs(t) {
		times[id]++
	}
	one := func(o orders.Order, sequence int) string { return fmt.Sprintf("%d-%d", o.ID, sequence) }
	if len(times) != 3 || times[one(o, 1)] != 2 || times[one(other, 1)] != 2 || times[one(o, 2)] != 1 {
		t.Errorf("sent %v, want what was not marked twice, under the same id, and the rest once", times)
	}
}

// TestEventsWaitForTheBroker: placing goes on, nothing is lost, and few attempts are spent on an outage.
func TestEventsWaitForTheBroker(t *testing.T) {
	t.Parallel()
	b := eventSetup(t)
	r := startEvents(t, b.store, b.eventSender(t), relay.EventsConfig{BackoffMin: 20 * time.Millisecond, PauseMax: 100 * time.Millisecond})
	b.place(t, orders.NewOrder{})
	b.awaitEvents(t, "sent", 1)
	eventually(t, "ready", func() bool { return r.Ready() == nil }, func() any { return r.Ready() })

	// First it answers with errors, then not at all.
	fails := b.broker.FailNext(lapsetest.SendMessage, 1<<30, v2.Code_INTERNAL_SERVER_ERROR)
	const more = 30
	for range more {
		b.pay(t, b.place(t, orders.NewOrder{}))
	}
	eventually(t, "some sends have failed", func() bool { return r.metric(t, "send_failures_total") >= 5 })
	if err := r.Ready(); err == nil || r.metric(t, "paused") != 1 {
		t.Errorf("Ready says %v, paused is %v, while every send fails", err, r.metric(t, "paused"))
	}
	b.broker.Stop()
	b.place(t, orders.NewOrder{})
	eventually(t, "the lost connection is noticed, and the relay paused for it", func() bool { return errors.Is(r.Ready(), rmq.ErrNotReady) && r.metric(t, "paused") == 1 })
	fails()
	if err := b.broker.Resume(); err != nil {
		t.Fatal(err)
	}
	b.awaitEvents(t, "sent", 2+2*more)
	eventually(t, "ready again", func() bool { return r.Ready() == nil && r.metric(t, "paused") == 0 }, func() any { return r.Ready() })
	if n := b.db.Int(t, "SELECT MAX(attempts) FROM event_outbox"); n > 8 {
		t.Errorf("%d attempts were spent on one event", n)
	}
	b.wantSequences(t)
}

// wantSequences fails unless each order's events were accepted in their sequence; repetitions of the last one may be.
func (b *bundle) wantSequences(t *testing.T) {
	t.Helper()
	last := map[string]string{}
	for _, m := range b.broker.Sent(eventTopic) {
		a := attributesOf(t, m.Body)
		if a.Sequence < last[a.Subject] {
			t.Errorf("event %s was stored after %s", a.ID, last[a.Subject])
		}
		last[a.Subject] = a.Sequence
	}
}

func TestRelayOfEventsWithNothingLeftToSendIsNotPausedForEver(t *testing.T) {
	t.Parallel()
	b := eventSetup(t)
	b.place(t, orders.NewOrder{})
	refuse := senderFunc(func(context.Context, relay.Message) (string, error) { return "", errors.New("no route to the broker") })
	r := startEvents(t, b.store, refuse, relay.EventsConfig{BackoffMin: 5 * time.Millisecond, BackoffMax: 50 * time.Millisecond})
	eventually(t, "the relay says why it is paused", func() bool { return strings.Contains(fmt.Sprint(r.Ready()), "no route") && r.metric(t, "paused") == 1 })
	// Another relay has sent it.
	b.db.Exec(t, "UPDATE event_outbox SET state = 'sent', lease_token = NULL")
	eventually(t, "the relay is ready", func() bool { return r.Ready() == nil && r.metric(t, "paused") == 0 }, func() any { return r.Ready() })
}

func TestSeveralRelaysSendAnOrdersEventsInSequence(t *testing.T) {
	t.Parallel()
	b := eventSetup(t)
	const n = 100
	for range n {
		b.pay(t, b.place(t, orders.NewOrder{}))
	}
	for range 3 {
		startEvents(t, b.store, b.eventSender(t), relay.EventsConfig{ClaimLimit: 7, Poll: 5 * time.Millisecond})
	}
	b.awaitEvents(t, "sent", 2*n)
	if ids := b.toldIDs(t); len(ids) != 2*n {
		t.Errorf("%d events were sent, want %d, each once", len(ids), 2*n)
	}
	b.wantSequences(t)
}

func TestEventThatTheBrokerRefusesIsParkedAndTheOthersGoOn(t *testing.T) {
	t.Parallel()
	b := eventSetup(t)
	o := b.place(t, orders.NewOrder{})
	b.pay(t, o)
	b.broker.FailNext(lapsetest.SendMessage, 1, v2.Code_MESSAGE_PROPERTIES_TOO_LARGE)
	r := startEvents(t, b.store, b.eventSender(t), relay.EventsConfig{})
	b.awaitEvents(t, "parked", 1)
	b.awaitEvents(t, "sent", 1)
	if ids := b.toldIDs(t); !slices.Equal(ids, []string{fmt.Sprintf("%d-2", o.ID)}) {
		t.Errorf("sent %v", ids)
	}
	if n := r.metric(t, "parked_total"); n != 1 {
		t.Errorf("%v parked events are counted, want 1", n)
	}
	parked := b.db.Text(t, "SELECT CONCAT(ref, ' ', reason, ' ', body) FROM parked")
	for _, part := range []string{fmt.Sprintf("event:%d-1 ", o.ID), orders.OutgoingPlaced, "43101", `"specversion":"1.0"`} {
		if !strings.Contains(parked, part) {
			t.Errorf("no %q in what is parked: %s", part, parked)
		}
	}
}

func TestStoppingRelayOfEventsMarksWhatIsUnderWayAndGivesTheRestBack(t *testing.T) {
	t.Parallel()
	b := eventSetup(t)
	for range 5 {
		b.place(t, orders.NewOrder{})
	}
	sending, wake := make(chan struct{}), make(chan struct{})
	var sends atomic.Int64
	r := startEvents(t, b.store, senderFunc(func(ctx context.Context, _ relay.Message) (string, error) {
		if sends.Add(1) == 1 {
			close(sending)
		}
		select {
		case <-wake:
			return "stored", nil
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}), relay.EventsConfig{Senders: 1, Lease: 4 * limit, SendTimeout: limit, StopTimeout: limit})
	select {
	case <-sending:
	case <-time.After(limit):
		t.Fatal("nothing is sent")
	}
	stopped := make(chan struct{})
	go func() { // ended by wake
		defer close(stopped)
		r.stop()
	}()
	close(wake)
	<-stopped
	sent := b.db.Int(t, "SELECT COUNT(*) FROM event_outbox WHERE state = 'sent' AND message_id = 'stored'")
	back := b.db.Int(t, "SELECT COUNT(*) FROM event_outbox WHERE state = 'pending' AND lease_token IS NULL AND attempts = 0 AND available_at <= UTC_TIMESTAMP(3)")
	if sent != sends.Load() || sent+back != 5 {
		t.Errorf("%d sends, %d marked sent, %d given back", sends.Load(), sent, back)
	}
	if err := r.Ready(); !errors.Is(err, relay.ErrStopped) {
		t.Errorf("Ready after the stop says %v, want ErrStopped", err)
	}
}

func TestSlowSendsOfEventsEndBeforeTheirLease(t *testing.T) {
	t.Parallel()
	b := eventSetup(t)
	const events, lease, slow = 12, 3 * time.Second, 400 * time.Millisecond
	for range events {
		b.place(t, orders.NewOrder{})
	}
	// One sender, and every send takes as long as it may: twelve do not fit into a lease.
	r := startEvents(t, b.store, senderFunc(func(ctx context.Context, _ relay.Message) (string, error) {
		<-ctx.Done()
		return "stored", nil
	}), relay.EventsConfig{Senders: 1, Lease: lease, SendTimeout: slow})
	b.awaitEvents(t, "sent", events)
	if n := r.metric(t, "lost_leases_total"); n != 0 {
		t.Errorf("%v leases were lost", n)
	}
	if n := b.db.Int(t, "SELECT MAX(attempts) FROM event_outbox"); n != 0 {
		t.Errorf("an event that was given back counts %d attempts", n)
	}
}

func TestTopicOfEventsOfTheWrongTypeIsNamed(t *testing.T) {
	t.Parallel()
	b := eventSetup(t)
	b.broker.CreateTopic(eventTopic, lapsetest.Delay, 8)
	r := startEvents(t, b.store, b.eventSender(t), relay.EventsConfig{})
	b.place(t, orders.NewOrder{})
	eventually(t, "the relay names the topic, its type and the one that is needed", func() bool {
		said := fmt.Sprint(r.Ready())
		return strings.Contains(said, eventTopic) && strings.Contains(said, "DELAY") && strings.Contains(said, "NORMAL")
	}, func() any { return r.Ready() })
	if n := b.db.Int(t, "SELECT COUNT(*) FROM event_outbox WHERE state = 'pending' AND attempts = 0 AND lease_token IS NULL"); n != 1 {
		t.Errorf("%d rows are untouched, want 1", n)
	}
}

func TestEventsConfigThatCannotWorkIsRefusedWithFieldAndValue(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cfg  relay.EventsConfig
		want []string
	}{
		"blank in topic":          {relay.EventsConfig{Topic: "order events"}, []string{"Topic", "order events"}},
		"blank in source":         {relay.EventsConfig{Source: "/my shop"}, []string{"Source", "/my shop"}},
		"claim too large":         {relay.EventsConfig{ClaimLimit: 10_001}, []string{"ClaimLimit", "10001", "10000"}},
		"no senders":              {relay.EventsConfig{Senders: -1}, []string{"Senders", "-1"}},
		"negative lease":          {relay.EventsConfig{Lease: -1}, []string{"Lease"}},
		"send outlives the lease": {relay.EventsConfig{Lease: 8 * time.Second}, []string{"Lease", "8s", "SendTimeout", "5s"}},
		"backoff upside down":     {relay.EventsConfig{BackoffMin: time.Minute}, []string{"BackoffMax", "30s", "1m0s"}},
	} {
		_, err := relay.NewEvents(&orders.Store{}, &storedAtOnce{}, c.cfg)
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: error %q does not name %s", name, err, w)
			}
		}
	}
	if _, err := relay.NewEvents(nil, nil, relay.EventsConfig{}); err == nil {
		t.Error("neither store nor sender: accepted")
	}
}
