package rmq

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
)

// The tests of this file run on the real broker.

func realConfig(t *testing.T, b *stacktest.Broker) Config {
	return Config{Endpoints: b.Endpoints, TLS: TLS{Disabled: true}, Logger: testLog(t)}
}

func TestRealBrokerDeliversOnTimeAndTakesTheAck(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	topic, group := b.NewTopic(t, admin.Delay), b.NewGroup(t, 16)
	p, c := openProducer(t, realConfig(t, b), topic), openConsumer(t, realConfig(t, b), group, topic)
	due := time.Now().Add(2 * time.Second).Truncate(time.Millisecond).UTC()
	id, err := p.Send(t.Context(), Message{
		Topic: topic, Body: []byte("body"), Keys: []string{"1", "2"}, DeliverAt: due,
		Properties: map[string]string{"traceparent": "00-aa-bb-01"},
	})
	if err != nil {
		t.Fatal(err)
	}
	d := receiveOne(t, c, 15*time.Second)
	late := time.Since(due)
	if late < 0 || late > 5*time.Second {
		t.Errorf("received %s after it was due", late)
	}
	if d.MessageID != id || d.Topic != topic || string(d.Body) != "body" || strings.Join(d.Keys, " ") != "1 2" ||
		d.Attempt != 1 || !d.DeliverAt.Equal(due) || d.Properties["traceparent"] != "00-aa-bb-01" || d.BornAt.IsZero() {
		t.Errorf("received %+v, want what was sent as %s, due %s", d, id, due)
	}
	if err := c.Ack(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if err := c.Ack(t.Context(), d); err != nil {
		t.Errorf("second ack: %v", err)
	}
	t.Logf("received %s after it was due", late.Round(time.Millisecond))
}

func TestRealBrokerDeliversAgainAfterTheInvisibleTime(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	topic, group := b.NewTopic(t, admin.Delay), b.NewGroup(t, 16)
	p, c := openProducer(t, realConfig(t, b), topic), openConsumer(t, realConfig(t, b), group, topic)
	if _, err := p.Send(t.Context(), timed(topic, "x")); err != nil {
		t.Fatal(err)
	}
	first := receiveOne(t, c, 15*time.Second)
	got := time.Now()
	second := receiveOne(t, c, 30*time.Second)
	if second.MessageID != first.MessageID || second.Attempt != 2 || !second.DeliverAt.Equal(first.DeliverAt) {
		t.Errorf("received %+v, want %s again", second, first.MessageID)
	}
	t.Logf("received again after %s", time.Since(got).Round(time.Millisecond))
	if err := c.Ack(t.Context(), first); !errors.Is(err, ErrHandleExpired) {
		t.Errorf("ack with the expired handle: %v, want ErrHandleExpired", err)
	}
	// Put off and fetched back: the shortest change works, and the newest handle counts.
	if err := c.ChangeInvisible(t.Context(), second, time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := c.ChangeInvisible(t.Context(), second, time.Second); err != nil {
		t.Fatal(err)
	}
	got = time.Now()
	third := receiveOne(t, c, 20*time.Second)
	if third.MessageID != first.MessageID || third.Attempt != 3 {
		t.Errorf("received %+v, want %s a third time", third, first.MessageID)
	}
	t.Logf("received again %s after it was hidden for 1s", time.Since(got).Round(time.Millisecond))
	if err := c.Ack(t.Context(), third); err != nil {
		t.Fatal(err)
	}
}

func TestRealBrokerRefusesByTheKnownCodes(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	topic := b.NewTopic(t, admin.Delay)
	p := openProducer(t, realConfig(t, b), topic)
	day, props, reserved := timed(topic, "x"), timed(topic, "x"), timed(topic, "x")
	day.DeliverAt = time.Now().Add(25 * time.Hour)
	props.Properties = map[string]string{"p": strings.Repeat("x", 20<<10)}
	reserved.Properties = map[string]string{"KEYS": "x"}
	for name, c := range map[string]struct {
		m    Message
		code int32
	}{"beyond a day": {day, 40012}, "empty": {timed(topic, ""), 41302}, "properties": {props, 43101}, "reserved property": {reserved, 40007}} {
		_, err := p.Send(t.Context(), c.m)
		if code, ok := Code(err); !ok || code != c.code || !IsRefusedMessage(err) {
			t.Errorf("%s: %v, want refused with %d", name, err, c.code)
		}
	}
	if _, err := p.Send(t.Context(), timed(topic, "x")); err != nil {
		t.Errorf("a good message after them: %v", err)
	}
}

// case MQ-9
func TestRealTopicOfTheWrongTypeIsNamedWithItsTypeAndTheFix(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	normal, fifo := b.NewTopic(t, admin.Normal), b.NewTopic(t, admin.FIFO)
	group := b.NewGroup(t, 16)
	absent := "absent-" + normal
	for topic, found := range map[string]string{normal: "of type NORMAL", fifo: "of type FIFO", absent: "does not exist"} {
		for kind, ready := range map[string]func() error{
			"producer": newProducer(t, realConfig(t, b), topic).Ready,
			"consumer": newConsumer(t, realConfig(t, b), group, topic).Ready,
		} {
			var last error
			eventually(t, 10*time.Second, fmt.Sprintf("the %s names %s, %q and the fix", kind, topic, found), func() bool {
				last = ready()
				return last != nil && strings.Contains(last.Error(), "topic "+topic) && strings.Contains(last.Error(), found) &&
					strings.Contains(last.Error(), "-t "+topic) && strings.Contains(last.Error(), "+message.type=DELAY")
			})
			if kind == "producer" {
				t.Log(last)
			}
		}
	}
}

func TestRealTopicCreatedAfterTheFirstLookUpIsWaitedFor(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	topic := "late-" + strings.TrimPrefix(b.NewTopic(t, admin.Delay), "lapse-")
	p := newProducer(t, realConfig(t, b), topic)
	eventually(t, 5*time.Second, "Ready names the topic", func() bool { return strings.Contains(p.Ready().Error(), "does not exist") })
	if err := b.Admin.CreateTopic(t.Context(), topic, admin.Delay, 8); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Admin.DeleteTopic(context.Background(), topic); err != nil {
			t.Error(err)
		}
	})
	start := time.Now()
	awaitReady(t, 45*time.Second, p.Ready)
	t.Logf("ready %s after the topic was created", time.Since(start).Round(time.Millisecond))
	if _, err := p.Send(t.Context(), timed(topic, "x")); err != nil {
		t.Error(err)
	}
}

func TestRealMissingGroupIsNamedAndWaitedFor(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	topic := b.NewTopic(t, admin.Delay)
	group := "absent-" + topic
	c := newConsumer(t, realConfig(t, b), group, topic)
	eventually(t, 15*time.Second, "Ready names the group and the fix", func() bool {
		err := c.Ready().Error()
		return strings.Contains(err, "group "+group) && strings.Contains(err, "mqadmin updateSubGroup")
	})
	t.Log(c.Ready())
	if err := b.Admin.CreateGroup(t.Context(), group, 16); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Admin.DeleteGroup(context.Background(), group); err != nil {
			t.Error(err)
		}
	})
	start := time.Now()
	awaitReady(t, 45*time.Second, c.Ready)
	t.Logf("ready %s after the group was created", time.Since(start).Round(time.Millisecond))
}

func TestRealCancelledReceiveLosesNothing(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	topic, group := b.NewTopic(t, admin.Delay), b.NewGroup(t, 16)
	p, c := openProducer(t, realConfig(t, b), topic), openConsumer(t, realConfig(t, b), group, topic)
	for i := range 10 {
		m := timed(topic, fmt.Sprint(i))
		m.DeliverAt = time.Now().Add(time.Duration(i) * 200 * time.Millisecond)
		if _, err := p.Send(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	// A caller without patience: it gives up ten times a second.
	got := make(map[string]int)
	limit := within(t, 9*time.Second) // before any invisible time ends
	for len(got) < 10 && limit.Err() == nil {
		ctx, cancel := context.WithTimeout(limit, 100*time.Millisecond)
		ds, err := c.Receive(ctx, 32, 10*time.Second)
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		cancel()
		for _, d := range ds {
			got[string(d.Body)] = d.Attempt
			if err := c.Ack(t.Context(), d); err != nil {
				t.Error(err)
			}
		}
	}
	if len(got) != 10 {
		t.Errorf("received %v, want 10", got)
	}
	for body, attempt := range got {
		if attempt != 1 {
			t.Errorf("message %s came at attempt %d", body, attempt)
		}
	}
}

func TestRealBrokerIsUsedAgainSecondsAfterItsEnd(t *testing.T) {
	t.Parallel()
	s := stacktest.Private(t, stacktest.Options{Parts: []stacktest.Part{stacktest.NameServer, stacktest.BrokerProxy}})
	b := s.Broker
	topic, group := b.NewTopic(t, admin.Delay), b.NewGroup(t, 16)
	p, c := openProducer(t, realConfig(t, b), topic), openConsumer(t, realConfig(t, b), group, topic)
	ends := map[string]func(testing.TB, stacktest.Part){"SIGKILL": s.Kill}
	if os.Getenv("LAPSE_TEST_FULL") == "1" {
		ends["SIGTERM"] = s.Stop // takes the broker half a minute
	}
	for name, end := range ends {
		const messages = 500
		sent := make(map[string]bool)
		due := time.Now().Add(3 * time.Second)
		for i := range messages {
			body := fmt.Sprint(name, i)
			m := timed(topic, body)
			m.DeliverAt = due
			if _, err := p.Send(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			sent[body] = true
		}
		// A consumer that goes on receiving through it all.
		ctx, stop := context.WithCancel(within(t, 3*time.Minute))
		var wg sync.WaitGroup
		var mu sync.Mutex
		got, duplicates, others := make(map[string]bool), 0, 0
		var up, first time.Time
		for range 2 {
			wg.Go(func() {
				for ctx.Err() == nil {
					ds, err := c.Receive(ctx, 32, 10*time.Second)
					if err != nil {
						pause(ctx, 100*time.Millisecond)
						continue
					}
					mu.Lock()
					if len(ds) > 0 && !up.IsZero() && first.IsZero() {
						first = time.Now()
					}
					for _, d := range ds {
						switch body := string(d.Body); {
						case got[body]:
							duplicates++
						default:
							got[body] = true
							if !sent[body] { // of the round before, or the probe's
								others++
							}
						}
					}
					mu.Unlock()
					for _, d := range ds {
						_ = c.Ack(ctx, d) // one that fails comes again
					}
				}
			})
		}
		end(t, stacktest.BrokerProxy)
		eventually(t, 5*time.Second, "Ready says so", func() bool { return errors.Is(c.Ready(), ErrNotReady) })
		if _, err := p.Send(within(t, time.Second), timed(topic, "down")); !IsUnavailable(err) {
			t.Errorf("%s: send while it is down: %v", name, err)
		}
		if c.Ready() == nil {
			t.Errorf("%s: ready while the broker is down", name)
		}
		// Start returns when the route is answered, which is later than the port.
		watch := make(chan time.Time, 1)
		wg.Go(func() { watch <- untilListening(ctx, b.Endpoints) })
		s.Start(t, stacktest.BrokerProxy)
		started := time.Now()
		mu.Lock()
		up = <-watch
		mu.Unlock()
		awaitReady(t, 10*time.Second, c.Ready)
		awaitReady(t, 10*time.Second, p.Ready)
		ready := time.Now()
		eventually(t, 60*time.Second, "all messages came", func() bool { mu.Lock(); defer mu.Unlock(); return len(got)-others >= messages })
		if _, err := p.Send(t.Context(), timed(topic, "again")); err != nil {
			t.Errorf("%s: send after it: %v", name, err)
		}
		eventually(t, 20*time.Second, "the next message comes", func() bool { mu.Lock(); defer mu.Unlock(); return got["again"] })
		stop()
		wg.Wait()
		t.Logf("%s: %d of %d messages, %d duplicates; after the port was open: route answered %s, ready %s, first message noticed %s", name,
			len(got)-others, messages, duplicates, started.Sub(up).Round(time.Millisecond), ready.Sub(up).Round(time.Millisecond), first.Sub(up).Round(time.Millisecond))
		for body := range sent {
			if !got[body] {
				t.Errorf("%s: %s is lost", name, body)
			}
		}
	}
}
