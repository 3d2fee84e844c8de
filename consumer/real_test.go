// The consumer on the real servers: the shared stack, and private ones whose servers are stopped and killed under load.

package consumer

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
)

// tick is what the broker of the stack rounds delivery times up to.
const tick = 100 * time.Millisecond

// sender sends timed messages to one topic of a real broker.
func sender(t testing.TB, endpoints, topic string) *rmq.Producer {
	t.Helper()
	p, err := rmq.NewProducer(rmq.Config{Endpoints: endpoints, TLS: rmq.TLS{Disabled: true}, Logger: testLog(t)}, topic)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Errorf("close producer: %v", err)
		}
	})
	until(t, "the producer is ready", func() bool { return p.Ready() == nil })
	return p
}

func send(t testing.TB, p *rmq.Producer, topic string, due time.Time, ids ...string) {
	t.Helper()
	if _, err := p.Send(t.Context(), rmq.Message{Topic: topic, Body: expiry(t, ids...), Keys: ids, DeliverAt: due}); err != nil {
		t.Fatalf("send: %v", err)
	}
}

// spread makes n orders that fall due evenly over a span from now on, and sends their messages, one for each tick that has any. They are
// placed first, whatever time that takes on a busy machine, and get their deadlines then.
func (s *shop) spread(t testing.TB, p *rmq.Producer, topic string, n int, from, span time.Duration) (ids []string) {
	t.Helper()
	const each = 10
	ids = s.place(t, n, time.Now().Add(time.Hour))
	begin := time.Now().Add(from)
	for some := range slices.Chunk(ids, each) {
		due := begin.Truncate(tick).Add(tick)
		s.db.Exec(t, "UPDATE orders SET deadline_at = ? WHERE id IN "+in(some), due.UTC().Format("2006-01-02 15:04:05.000"))
		send(t, p, topic, due, some...)
		begin = begin.Add(span / time.Duration(n/each))
	}
	return ids
}

func TestOrdersAreCancelledOnTimeByTwoConsumersOfOneGroup(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	topic, group := broker.NewTopic(t, admin.Delay), broker.NewGroup(t, 16)
	s := newShop(t)
	p := sender(t, broker.Endpoints, topic)
	o := replicaOptions{endpoint: broker.Endpoints, group: group, topic: topic}
	a, b := startReplica(t, s.store, o), startReplica(t, openStore(t, s.db.DSN), o)
	a.ready(t)
	b.ready(t)
	ids := s.spread(t, p, topic, 400, 2*time.Second, 6*time.Second)
	s.wantCancelledOnce(t, ids)
	na, nb := metric(t, a.reg, "lapse_outcomes_total", "cancelled"), metric(t, b.reg, "lapse_outcomes_total", "cancelled")
	if na+nb != 400 {
		t.Errorf("%v and %v outcomes of cancelled, want 400 in all", na, nb)
	}
	if na == 0 || nb == 0 {
		t.Errorf("%v and %v outcomes of cancelled, want some of each consumer", na, nb)
	}
	until(t, "everything is acknowledged", func() bool {
		return metric(t, a.reg, "lapse_acks_total", "ok")+metric(t, b.reg, "lapse_acks_total", "ok") == 40
	})
	late := s.db.Int(t, "SELECT MAX(TIMESTAMPDIFF(MICROSECOND, deadline_at, cancelled_at)) FROM orders WHERE id IN "+in(ids))
	t.Logf("latest cancel %d ms after its deadline", late/1000)
	if late > 10_000_000 {
		t.Errorf("an order was cancelled %d ms late", late/1000)
	}

	// case MQ-16: both wait in a long poll.
	begun := time.Now()
	a.stop()
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("it took %s to stop, want at most the grace of 20 s", took)
	}
}

// case MQ-15
func TestADeadLetterOfTheRealBrokerIsSeenAndItsReplayIsHarmless(t *testing.T) {
	t.Parallel()
	broker := stacktest.Shared(t)
	topic, group := broker.NewTopic(t, admin.Delay), broker.NewGroup(t, 1)
	if err := broker.Admin.CreateGroup(t.Context(), DeadLetterGroup(group), 16); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := broker.Admin.DeleteGroup(context.Background(), DeadLetterGroup(group)); err != nil {
			t.Logf("left behind: %v", err)
		}
	})
	s := newShop(t)
	p := sender(t, broker.Endpoints, topic)
	id := s.place(t, 1, time.Now().Add(time.Hour))[0]

	// The watcher is there before its topic is.
	dead := connect(t, broker.Endpoints, DeadLetterGroup(group), DeadLetterTopic(group))
	log, reg := watch(t, dead, s.store, DeadLetterConfig{Retry: time.Second})

	// A consumer that takes the message and never acknowledges it: two deliveries, and the Receive after them buries it.
	hopeless := connect(t, broker.Endpoints, group, topic)
	until(t, "the hopeless consumer is ready", func() bool { return hopeless.Ready() == nil })
	send(t, p, topic, time.Now(), id)
	limit := time.Now().Add(time.Minute)
	attempts := 0
	for metric(t, reg, "lapse_dead_letters_total", "") == 0 {
		if time.Now().After(limit) {
			t.Fatalf("no dead letter was counted within a minute, after %d deliveries", attempts)
		}
		ds, err := hopeless.Receive(t.Context(), 1, 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range ds {
			attempts = d.Attempt
			if err := hopeless.ChangeInvisible(t.Context(), d, time.Second); err != nil {
				t.Fatal(err)
			}
		}
	}
	if attempts != 2 {
		t.Errorf("the last delivery was number %d, want 2", attempts)
	}
	until(t, "an error names the order", func() bool { return log.errorsWith("dead letter", id) == 1 })
	until(t, "it is parked with its body", func() bool {
		return s.db.Int(t, "SELECT COUNT(*) FROM parked WHERE what = 'message' AND CONVERT(body USING utf8mb4) LIKE CONCAT('%', ?, '%')", id) == 1
	})

	number, err := orders.ParseID(id)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.store.RecordPayment(t.Context(), orders.Payment{Gateway: "bank", TransactionID: "t", OrderID: number, Currency: "EUR", Amount: 1000}); err != nil {
		t.Fatal(err)
	}
	r := startReplica(t, s.store, replicaOptions{endpoint: broker.Endpoints, group: group, topic: topic}).ready(t)
	send(t, p, topic, time.Now(), id) // the replay
	until(t, "the replay is acknowledged", func() bool { return metric(t, r.reg, "lapse_acks_total", "ok") == 1 })
	if n := metric(t, r.reg, "lapse_outcomes_total", "already_paid"); n != 1 || s.cancelled(t, []string{id}) != 0 {
		t.Errorf("%v outcomes of already paid, want 1, and the order kept", n)
	}
	s.wantSound(t)
}

func connect(t testing.TB, endpoints, group, topic string) *Connection {
	t.Helper()
	c, err := Connect(RocketMQ{Endpoints: endpoints, TLS: TLS{Disabled: true}}, group, topic)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Errorf("close connection: %v", err)
		}
	})
	return c
}

// private is a stack of the test's own, with a shop in lapse's own database, and a consumer that has the rights of its role.
type private struct {
	*shop
	stack        *stacktest.Stack
	topic, group string
	producer     *rmq.Producer
	replica      *replica
}

func newPrivate(t *testing.T) *private {
	t.Helper()
	stack := stacktest.Private(t, stacktest.Options{
		Parts: []stacktest.Part{stacktest.MySQL, stacktest.NameServer, stacktest.BrokerProxy},
		Env:   []string{"STACK_STOP_TIMEOUT=1"}, // at the end the data goes too, so that no server needs time to keep it
	})
	pool, err := sql.Open("mysql", stack.MySQLAdminDSN()+"lapse")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pool.Close() })
	if _, err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	x := &private{stack: stack, topic: stack.Getenv("LAPSE_ROCKETMQ_TOPIC"), group: stack.Getenv("LAPSE_ROCKETMQ_GROUP")}
	x.shop = shopOn(t, &mysqltest.DB{Name: "lapse", DSN: stack.MySQLAdminDSN() + "lapse", SQL: pool})
	x.producer = sender(t, stack.Endpoints(), x.topic)
	x.replica = startReplica(t, openStore(t, stack.Getenv("LAPSE_MYSQL_DSN_CONSUME")), replicaOptions{
		endpoint: stack.Endpoints(), group: x.group, topic: x.topic,
		// The shortest that the broker allows, so that an outage outlasts it.
		cfg: Config{Invisible: 10 * time.Second, CancelTimeout: 5 * time.Second},
	}).ready(t)
	return x
}

func (x *private) setReadOnly(t *testing.T, on bool) {
	t.Helper()
	value := map[bool]string{true: "ON", false: "OFF"}[on]
	_, err := x.db.SQL.ExecContext(t.Context(), "SET GLOBAL super_read_only = "+value)
	var unknown *mysql.MySQLError
	if err == nil || errors.As(err, &unknown) && unknown.Number == 1193 { // MariaDB has only the weaker one
		_, err = x.db.SQL.ExecContext(t.Context(), "SET GLOBAL read_only = "+value)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// wantNoHarm checks what an outage of the database must not do to the messages.
func (x *private) wantNoHarm(t *testing.T) {
	t.Helper()
	if n := x.replica.source.maxAttempt.Load(); n > 2 {
		t.Errorf("a message was delivered %d times, want at most 2", n)
	}
	if _, err := x.stack.Broker.Admin.Topic(t.Context(), DeadLetterTopic(x.group)); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("dead-letter topic: %v, want none", err)
	}
	if n := x.db.Int(t, "SELECT COUNT(*) FROM parked"); n != 0 {
		t.Errorf("%d things are parked", n)
	}
}

// One stack for all of it, since bringing it up and down takes longer than the tests.
func TestServersThatFailUnderLoadCostNothingButTime(t *testing.T) {
	t.Parallel()
	x := newPrivate(t)
	paused := func() bool { return metric(t, x.replica.reg, "lapse_consumer_paused", "") == 1 }

	// case DB-9
	t.Run("ReadOnlyDatabase", func(t *testing.T) {
		ids := x.spread(t, x.producer, x.topic, 300, 2*time.Second, 8*time.Second)
		until(t, "some orders are cancelled", func() bool { return x.cancelled(t, ids) > 0 })
		x.setReadOnly(t, true)
		until(t, "the consumer is paused", paused)
		if err := x.replica.Ready(); err == nil {
			t.Error("the consumer says that it is ready")
		}
		until(t, "the Receives under way have ended", func() bool {
			x.replica.mu.Lock()
			defer x.replica.mu.Unlock()
			return x.replica.reserved == 0
		})
		receives, acks := x.replica.source.receives.Load(), metric(t, x.replica.reg, "lapse_acks_total", "ok")
		done := x.cancelled(t, ids)
		if done == len(ids) {
			t.Fatal("every order was cancelled before the database turned read-only")
		}
		// Longer than the 10 s that messages are hidden for and the 3 s that the broker adds.
		during(t, 14*time.Second, "nothing is received or acknowledged", func() bool {
			return x.replica.source.receives.Load() == receives && metric(t, x.replica.reg, "lapse_acks_total", "ok") == acks
		})
		if n := x.cancelled(t, ids); n != done {
			t.Errorf("%d orders are cancelled, %d were when it turned read-only", n, done)
		}
		x.setReadOnly(t, false)
		x.wantCancelledOnce(t, ids)
		until(t, "the consumer is ready", func() bool { return x.replica.Ready() == nil })
		x.wantNoHarm(t)
	})

	t.Run("RestartedDatabase", func(t *testing.T) {
		ids := x.spread(t, x.producer, x.topic, 300, 2*time.Second, 8*time.Second)
		until(t, "some orders are cancelled", func() bool { return x.cancelled(t, ids) > 0 })
		x.stack.Kill(t, stacktest.MySQL)
		until(t, "the consumer is paused", paused)
		x.stack.Start(t, stacktest.MySQL)
		x.wantCancelledOnce(t, ids)
		until(t, "the consumer is ready", func() bool { return x.replica.Ready() == nil })
		x.wantNoHarm(t)
	})

	t.Run("RestartedBroker", func(t *testing.T) {
		ids := x.spread(t, x.producer, x.topic, 300, 2*time.Second, 8*time.Second)
		until(t, "some orders are cancelled", func() bool { return x.cancelled(t, ids) > 0 })
		x.stack.Kill(t, stacktest.BrokerProxy)
		if x.cancelled(t, ids) == len(ids) {
			t.Fatal("every order was cancelled before the broker was killed")
		}
		x.stack.Start(t, stacktest.BrokerProxy)
		up := time.Now()
		x.wantCancelledOnce(t, ids)
		t.Logf("everything was cancelled %s after the broker was up again", time.Since(up).Round(time.Millisecond))
		until(t, "the consumer is ready", func() bool { return x.replica.Ready() == nil })
		if n := x.db.Int(t, "SELECT COUNT(*) FROM parked"); n != 0 {
			t.Errorf("%d things are parked", n)
		}
	})
}
