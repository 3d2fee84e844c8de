package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/producer"
)

const (
	testTopic = "order-timeout"
	testGroup = "order-timeout-cg"
)

// bundle is one test's own database and embedded broker.
type bundle struct {
	db     *mysqltest.DB
	store  *orders.Store
	broker *lapsetest.Broker
}

func setup(t *testing.T) *bundle {
	t.Helper()
	b := setupEmpty(t)
	if _, err := migrations.Up(t.Context(), b.db.SQL); err != nil {
		t.Fatal(err)
	}
	return b
}

// setupEmpty leaves the database without tables.
func setupEmpty(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{db: mysqltest.Empty(t, mysqltest.AdminDSN(t))}
	b.broker = lapsetest.Start(t, lapsetest.WithPollLimit(time.Second))
	b.broker.CreateTopic(testTopic, lapsetest.Delay, 8)
	b.broker.CreateGroup(testGroup, 16)
	var err error
	if b.store, err = orders.Open(b.db.DSN, orders.Config{MaxOpenConns: 4}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.store.Close() })
	return b
}

// environ is the configuration of a service on the bundle's servers.
func (b *bundle) environ(more ...string) []string {
	return environOf(b.db.DSN, b.broker.Endpoint(), more...)
}

func environOf(dsn, endpoints string, more ...string) []string {
	return append([]string{
		"LAPSE_MYSQL_DSN=" + dsn, "LAPSE_MYSQL_MAX_OPEN_CONNS=8", "LAPSE_ROCKETMQ_ENDPOINTS=" + endpoints, "LAPSE_ROCKETMQ_TLS_ENABLED=false",
		"LAPSE_HTTP_ADDR=127.0.0.1:0", "LAPSE_LOG_FORMAT=json",
	}, more...)
}

func (b *bundle) place(t *testing.T, n orders.NewOrder) orders.Order {
	t.Helper()
	if n.Currency == "" {
		n.Currency = "EUR"
	}
	o, err := b.store.Place(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// placeWithStock places orders of one piece each.
func (b *bundle) placeWithStock(t *testing.T, count int, timeout time.Duration) []int64 {
	t.Helper()
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 1000, 0, 0)")
	ids := make([]int64, count)
	for i := range ids {
		ids[i] = b.place(t, orders.NewOrder{Timeout: timeout, Items: []orders.Item{{SKU: "pen", Quantity: 1, Price: 100}}}).ID
	}
	return ids
}

func (b *bundle) status(t *testing.T, id int64) orders.Status {
	t.Helper()
	return orders.Status(b.db.Text(t, "SELECT status FROM orders WHERE id = ?", id))
}

// cancelledOnce fails the test unless each order is cancelled, by one event, and released once.
func (b *bundle) cancelledOnce(t *testing.T, ids ...int64) {
	t.Helper()
	for _, id := range ids {
		if got := b.status(t, id); got != orders.Cancelled {
			t.Errorf("order %d is %s, want cancelled", id, got)
		}
		if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE order_id = ? AND kind = 'cancelled'", id); n != 1 {
			t.Errorf("order %d has %d events of a cancel, want 1", id, n)
		}
		if n := b.db.Int(t, "SELECT COUNT(*) FROM stock_ledger WHERE order_id = ? AND kind = 'release'", id); n != 1 {
			t.Errorf("order %d was released %d times, want once", id, n)
		}
	}
	if available, want := b.db.Int(t, "SELECT available FROM stock WHERE sku = 'pen'"), b.db.Int(t, "SELECT 1000 - reserved - sold FROM stock WHERE sku = 'pen'"); available != want {
		t.Errorf("%d pieces are available, want %d", available, want)
	}
}

func (b *bundle) message(t *testing.T, ids ...int64) {
	t.Helper()
	due := time.Now().Truncate(time.Millisecond)
	texts := make([]string, len(ids))
	for i, id := range ids {
		texts[i] = orders.FormatID(id)
	}
	body, err := orders.EncodeExpiry(orders.Expiry{Due: due, Orders: texts})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.broker.Inject(testTopic, body, due); err != nil {
		t.Fatal(err)
	}
}

// lock holds the rows of a query until free is called, so that whoever needs them waits.
func (b *bundle) lock(t *testing.T, query string, args ...any) (free func()) {
	t.Helper()
	tx, err := b.db.SQL.BeginTx(context.WithoutCancel(t.Context()), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	free = func() { once.Do(func() { _ = tx.Rollback() }) }
	t.Cleanup(free)
	if _, err := tx.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatal(err)
	}
	return free
}

// waiting is how many statements like a pattern are under way in this database: while the test holds their rows, that many wait for them. It
// is -1 where the server cannot say, which is while a statement of some other test has binary in it that the process list cannot hold (3854).
// INNODB_TRX would be exact, but keeps its old content for as long as it is read more than ten times a second.
func (b *bundle) waiting(t *testing.T, like string) int64 {
	t.Helper()
	var n int64
	err := b.db.SQL.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE db = ? AND command <> 'Sleep' AND id <> CONNECTION_ID() AND info LIKE ?",
		b.db.Name, like).Scan(&n)
	var refused *mysql.MySQLError
	switch {
	case errors.As(err, &refused) && refused.Number == 3854:
		return -1
	case err != nil:
		t.Fatal(err)
	}
	return n
}

// metric sums the series of one metric of a service, optionally of those whose labels contain a text; false where there is none.
func (p *process) metric(t *testing.T, name, labels string) (float64, bool) {
	t.Helper()
	_, body := p.get(t, "/metrics")
	sum, found := 0.0, false
	for line := range strings.Lines(body) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		base, rest, _ := strings.Cut(series, "{")
		if !ok || base != name || !strings.Contains(rest, labels) {
			continue
		}
		f, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		sum, found = sum+f, true
	}
	return sum, found
}

// The whole path through the binary: started on an empty database, migrated, an order placed and cancelled by its message; what the
// services say of it. Its configuration file is rewritten all the while.
//
// case CFG-2, DB-15
func TestOrderIsCancelledByRelayAndConsumer(t *testing.T) {
	t.Parallel()
	b := setupEmpty(t)
	file := filepath.Join(t.TempDir(), "lapse.yaml")
	content := "relay:\n  linger: 10ms\nlog:\n  level: debug\n"
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	relay := start(t, b.environ(), "relay", "--config", file)
	consume := start(t, b.environ(), "consume", "--config", file)
	services := map[string]*process{"relay": relay, "consume": consume}
	for name, p := range services {
		eventually(t, name+" names the missing tables", func() bool {
			status, body := p.get(t, "/readyz")
			return status == http.StatusServiceUnavailable && strings.Contains(body, `run \"lapse migrate up\"`)
		})
		if status, body := p.get(t, "/healthz"); status != http.StatusOK || body != "ok\n" {
			t.Errorf("%s: /healthz answers %d %q before it is ready, want 200", name, status, body)
		}
		code, stdout, stderr := lapse(t, []string{"LAPSE_HTTP_ADDR=" + p.addr(t)}, "health", name)
		if code != 1 || !strings.Contains(stdout, `database: the database is not ready: it has no lapse tables; run "lapse migrate up"`) || stderr != "lapse: not ready\n" {
			t.Errorf("health of %s: exit code %d, stdout %q, stderr %q", name, code, stdout, stderr)
		}
	}
	if code, _, stderr := lapse(t, b.environ(), "migrate", "up"); code != 0 {
		t.Fatalf("migrate up: exit code %d, %s", code, stderr)
	}
	for _, p := range services {
		p.ready(t)
	}

	// Two ids that are one number in floating point.
	paid := b.place(t, orders.NewOrder{ID: 9007199254740992, Amount: 100, Timeout: time.Second})
	if _, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: "g", TransactionID: "1", OrderID: paid.ID, Currency: "EUR", Amount: 100}); err != nil {
		t.Fatal(err)
	}
	unpaid := b.place(t, orders.NewOrder{ID: 9007199254740993, Timeout: time.Second})
	rewritten := make(chan error, 1)
	go func() { rewritten <- rewrite(file, content, 1000) }() // ends after that many
	eventually(t, "the unpaid order is cancelled", func() bool { return b.status(t, unpaid.ID) == orders.Cancelled })
	if err := <-rewritten; err != nil {
		t.Fatal(err)
	}
	if got := b.status(t, paid.ID); got != orders.Paid {
		t.Errorf("order %d is %s, want paid", paid.ID, got)
	}
	if late := b.db.Int(t, "SELECT TIMESTAMPDIFF(MICROSECOND, deadline_at, cancelled_at) FROM orders WHERE id = ?", unpaid.ID); late < 0 {
		t.Errorf("it was cancelled %d µs before its deadline", -late)
	}

	for _, want := range []struct {
		service, name, labels string
		value                 float64
	}{
		{"relay", "lapse_relay_sent_orders_total", "", 2},
		{"relay", "lapse_relay_paused", "", 0},
		{"relay", "lapse_outbox_pending_rows", "", 0},
		{"relay", "lapse_outbox_oldest_seconds", "", 0},
		{"consume", "lapse_outcomes_total", `result="cancelled"`, 1},
		{"consume", "lapse_outcomes_total", `result="already_paid"`, 1},
		{"consume", "lapse_cancel_lateness_seconds_count", "", 1},
		{"consume", "lapse_consumer_paused", "", 0},
		{"consume", "lapse_dead_letters_total", "", 0},
		{"consume", "lapse_consumer_parked_total", "", 0},
		{"consume", "lapse_cancel_retries_total", "", 0},
		{"consume", "lapse_orders_overdue", "", 0},
		{"consume", "lapse_parked_rows", "", 0},
		{"consume", "lapse_ready", `check="database"`, 1},
		{"consume", "lapse_ready", `check="broker"`, 1},
		{"consume", "lapse_ready", `check="consumer"`, 1},
	} {
		eventually(t, fmt.Sprintf("%s%s of %s is %v", want.name, want.labels, want.service, want.value), func() bool {
			got, found := services[want.service].metric(t, want.name, want.labels)
			return found && got == want.value
		})
	}
	for name, p := range services {
		for _, metric := range []string{"go_goroutines", "process_cpu_seconds_total", "lapse_build_info", "lapse_innodb_history_list_length",
			"lapse_transaction_retries_total", "lapse_stock_missing_total", "lapse_database_sample_timestamp_seconds", "lapse_rocketmq_requests_total"} {
			if _, found := p.metric(t, metric, ""); !found {
				t.Errorf("%s has no metric %s", name, metric)
			}
		}
		if status, _ := p.get(t, "/debug/pprof/"); status != http.StatusNotFound {
			t.Errorf("%s answers %d for profiles that nobody asked for, want 404", name, status)
		}
		p.signal(syscall.SIGTERM)
		if code := p.wait(t); code != 0 {
			t.Errorf("%s ends with %d, want 0", name, code)
		}
		if _, said := p.line("stopped"); !said {
			t.Errorf("the log of %s does not end with \"stopped\"", name)
		}
		if strings.Contains(p.stderr.String(), "database is closed") {
			t.Errorf("%s used the database after closing it", name)
		}
		for line := range strings.Lines(p.stderr.String()) {
			// The topic of the dead letters is missing before the first one.
			if strings.Contains(line, "%DLQ%") && !strings.Contains(line, `"level":"DEBUG"`) {
				t.Errorf("%s warns of what is in order: %s", name, line)
			}
		}
	}
}

// rewrite replaces a file n times, now with something else, now with half of it, now with rubbish, and by a link that is swapped as in a
// mounted ConfigMap.
func rewrite(file, content string, n int) error {
	variants := []string{strings.Replace(content, "10ms", "20ms", 1), content[:len(content)/2], "\t{", ""}
	for i := range n {
		next := file + "." + strconv.Itoa(i%7)
		if err := os.WriteFile(next, []byte(variants[i%len(variants)]), 0o600); err != nil {
			return err
		}
		if i%2 == 0 {
			link := file + ".link"
			if err := os.Symlink(next, link); err != nil {
				return err
			}
			next = link
		}
		if err := os.Rename(next, file); err != nil {
			return err
		}
	}
	return nil
}

// case DEP-3: the database refuses connections after the start, for 60 s under LAPSE_TEST_FULL=1, otherwise for 6 s.
func TestStartedBeforeEverythingItWaitsAndBecomesReady(t *testing.T) {
	t.Parallel()
	b := setupEmpty(t)
	b.broker.Stop()
	proxy := newProxy(t, b.db.DSN)
	refuse := 6 * time.Second
	if os.Getenv("LAPSE_TEST_FULL") == "1" {
		refuse = time.Minute
	}
	environ := environOf(proxy.dsn, b.broker.Endpoint(), "LAPSE_RELAY_LINGER=10ms")
	services := map[string]*process{"relay": spawn(t, environ, "relay"), "consume": spawn(t, environ, "consume")}
	for name, p := range services {
		eventually(t, name+" names what is missing", func() bool {
			status, body := p.get(t, "/readyz")
			return status == http.StatusServiceUnavailable && strings.Contains(body, "connect to the database") && strings.Contains(body, b.broker.Endpoint())
		})
	}
	// A topic that is there, and a message that is due, while the database is not.
	if err := b.broker.Resume(); err != nil {
		t.Fatal(err)
	}
	b.message(t, 4711)
	goroutines := map[string][]float64{}
	ctx, cancel := context.WithTimeout(t.Context(), refuse)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		for name, p := range services {
			n, _ := p.metric(t, "go_goroutines", "")
			goroutines[name] = append(goroutines[name], n)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	for name, counts := range goroutines {
		half := len(counts) / 2
		early, late := maxOf(counts[:half]), maxOf(counts[half:])
		t.Logf("%s has %v goroutines in the first half of the wait, %v in the second", name, early, late)
		// Connecting takes some for a moment; growth would be one or more for each of the tries.
		if late > early+5 {
			t.Errorf("%s grows while it waits: %v", name, counts)
		}
	}
	if n := len(b.broker.Acked(testGroup)); n != 0 {
		t.Errorf("%d messages were acknowledged without a database", n)
	}
	if n := b.broker.Calls(lapsetest.ReceiveMessage); n != 0 {
		t.Errorf("%d Receives were issued without a database; each uses up an attempt", n)
	}

	proxy.open()
	for name, p := range services {
		eventually(t, name+" names the missing tables", func() bool {
			_, body := p.get(t, "/readyz")
			return strings.Contains(body, `run \"lapse migrate up\"`)
		})
	}
	if code, _, stderr := lapse(t, b.environ(), "migrate", "up"); code != 0 {
		t.Fatalf("migrate up: exit code %d, %s", code, stderr)
	}
	for _, p := range services {
		p.ready(t)
	}
	o := b.place(t, orders.NewOrder{Timeout: time.Second})
	eventually(t, "the order is cancelled", func() bool { return b.status(t, o.ID) == orders.Cancelled })
	eventually(t, "both messages are acknowledged", func() bool { return len(b.broker.Acked(testGroup)) == 2 })
}

func maxOf(list []float64) float64 {
	m := 0.0
	for _, v := range list {
		m = max(m, v)
	}
	return m
}

// case PRD-7
func TestOrdersArePlacedWhileTheBrokerIsDownAtTheStart(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.broker.Stop()
	services := []*process{spawn(t, b.environ("LAPSE_RELAY_LINGER=10ms"), "relay"), spawn(t, b.environ(), "consume")}
	for _, p := range services {
		eventually(t, "it says that the broker is missing", func() bool {
			status, body := p.get(t, "/readyz")
			return status == http.StatusServiceUnavailable && strings.Contains(body, b.broker.Endpoint()) && strings.Contains(body, `"name": "database",
      "ready": true`)
		})
	}
	checkout, err := producer.Open(b.db.DSN, producer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = checkout.Close() })
	if err := checkout.Ready(t.Context()); err != nil {
		t.Fatalf("the checkout is not ready: %v", err)
	}
	o, err := checkout.PlaceOrder(t.Context(), producer.NewOrder{Currency: "EUR", Timeout: 4 * time.Second})
	if err != nil {
		t.Fatalf("no order can be placed: %v", err)
	}
	if n, there := services[1].metric(t, "lapse_receive_errors_total", ""); n != 0 || !there {
		t.Errorf("%v receive errors (there: %t); want 0: it waits for its first connection", n, there)
	}
	if err := b.broker.Resume(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the order is cancelled", func() bool { return b.status(t, o.ID) == orders.Cancelled })
	const tick = 100 * time.Millisecond
	for _, m := range b.broker.Sent(testTopic) {
		if early := o.DeadlineAt.Sub(m.DeliverAt); early > 0 || early <= -tick {
			t.Errorf("its message is due %s before the deadline that was promised; want at it, or within a tick after", early)
		}
	}
}

// A topic that is not there, or of another type, is named with the fix, and noticed when it is made good.
func TestTheMissingTopicIsNamedUntilItIsThere(t *testing.T) {
	t.Parallel()
	b := setup(t)
	environ := b.environ("LAPSE_ROCKETMQ_TOPIC=other", "LAPSE_ROCKETMQ_GROUP=other-cg")
	relay, consume := start(t, environ, "relay"), start(t, environ, "consume")
	missing := func(p *process, parts ...string) {
		t.Helper()
		eventually(t, fmt.Sprintf("the readiness says %q", parts), func() bool {
			_, body := p.get(t, "/readyz")
			for _, part := range parts {
				if !strings.Contains(body, part) {
					return false
				}
			}
			return strings.Contains(body, `"ready": false`)
		})
	}
	missing(relay, "other")
	b.broker.CreateTopic("other", lapsetest.Normal, 1)
	missing(relay, "other", "NORMAL", "DELAY")
	b.broker.CreateTopic("other", lapsetest.Delay, 1)
	relay.ready(t)
	missing(consume, "other-cg")
	b.broker.CreateGroup("other-cg", 16)
	consume.ready(t)
}

// case MQ-16
func TestAnIdleConsumerStopsWithinTheGrace(t *testing.T) {
	t.Parallel()
	shared := stacktest.Shared(t)
	db := mysqltest.New(t)
	topic, group := shared.NewTopic(t, admin.Delay), shared.NewGroup(t, 16)
	const grace = 10 * time.Second
	p := spawn(t, environOf(db.DSN, stacktest.Require(t, "LAPSE_ROCKETMQ_ENDPOINTS"), "LAPSE_SHUTDOWN_GRACE="+grace.String()), "consume", "--topic", topic, "--group", group)
	p.ready(t)
	eventually(t, "it has been in a long poll", func() bool {
		n, _ := p.metric(t, "lapse_rocketmq_requests_total", `method="ReceiveMessage"`)
		return n > 0
	})
	began := time.Now()
	p.signal(syscall.SIGTERM)
	if code := p.wait(t); code != 0 {
		t.Errorf("it ends with %d, want 0", code)
	}
	took := time.Since(began)
	t.Logf("an idle consumer on the real broker stopped in %s", took)
	if took > grace {
		t.Errorf("it took %s to stop, the grace is %s", took, grace)
	}
}

// case MQ-17
func TestWorkInHandIsFinishedAtAStop(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.placeWithStock(t, 5, time.Millisecond)
	environ := b.environ("LAPSE_CONSUMER_WORKERS=5", "LAPSE_CONSUMER_BATCH_ORDERS=1")
	free := b.lock(t, "SELECT id FROM orders FOR UPDATE")
	p := spawn(t, environ, "consume")
	p.ready(t)
	for _, id := range ids {
		b.message(t, id)
	}
	eventually(t, "five cancels wait for their rows", func() bool { return b.waiting(t, "%FOR UPDATE") == 5 })
	p.signal(syscall.SIGTERM)
	eventually(t, "it is stopping", func() bool { _, said := p.line("stopping: finishing what is in hand"); return said })
	free()
	if code := p.wait(t); code != 0 {
		t.Errorf("it ends with %d, want 0", code)
	}
	b.cancelledOnce(t, ids...)
	if acked, held := len(b.broker.Acked(testGroup)), len(b.broker.InFlight(testGroup)); acked != 5 || held != 0 {
		t.Errorf("%d messages are acknowledged and %d are not, want 5 and 0", acked, held)
	}
	if regexp.MustCompile(`(?i)is closed|bad connection|"level":"ERROR"`).MatchString(p.stderr.String()) {
		t.Errorf("the log of the stop has errors:\n%s", p.stderr)
	}

	// The next process gets them all again, and finds nothing to do.
	if n := b.broker.Duplicate(testTopic); n != 5 {
		t.Fatalf("%d messages were duplicated, want 5", n)
	}
	spawn(t, environ, "consume").ready(t)
	eventually(t, "the duplicates are acknowledged", func() bool { return len(b.broker.Acked(testGroup)) == 10 })
	b.cancelledOnce(t, ids...)
}

// A Receive that is under way at a stop is not cut off: what the broker hands out for it would come to another consumer seconds late.
func TestWhatAReceiveBringsAfterTheSignalIsDone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.placeWithStock(t, 3, time.Millisecond)
	p := spawn(t, b.environ(), "consume")
	p.ready(t)
	eventually(t, "it waits for messages", func() bool { return b.broker.Calls(lapsetest.ReceiveMessage) > 0 })
	p.signal(syscall.SIGTERM)
	eventually(t, "it is stopping", func() bool { _, said := p.line("stopping: finishing what is in hand"); return said })
	b.message(t, ids...)
	if code := p.wait(t); code != 0 {
		t.Errorf("it ends with %d, want 0", code)
	}
	b.cancelledOnce(t, ids...)
	if acked := len(b.broker.Acked(testGroup)); acked != 1 {
		t.Errorf("%d messages are acknowledged, want 1", acked)
	}
}

// The same with the broker that people run; lapsetest can count acknowledgements, and it can not be wrong about the real one's polls.
//
// case MQ-17
func TestWorkInHandIsFinishedAtAStopOnTheRealBroker(t *testing.T) {
	t.Parallel()
	shared := stacktest.Shared(t)
	b := &bundle{db: mysqltest.New(t)}
	var err error
	if b.store, err = orders.Open(b.db.DSN, orders.Config{MaxOpenConns: 4}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.store.Close() })
	topic, group := shared.NewTopic(t, admin.Delay), shared.NewGroup(t, 16)
	endpoints := stacktest.Require(t, "LAPSE_ROCKETMQ_ENDPOINTS")
	producer, err := rmq.NewProducer(rmq.Config{Endpoints: endpoints, TLS: rmq.TLS{Disabled: true}}, topic)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
		defer cancel()
		if err := producer.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "the test's producer is connected", func() bool { return producer.Ready() == nil })
	ids := b.placeWithStock(t, 5, time.Millisecond)
	send := func() {
		t.Helper()
		due := time.Now().Truncate(time.Millisecond)
		for _, id := range ids {
			body, err := orders.EncodeExpiry(orders.Expiry{Due: due, Orders: []string{orders.FormatID(id)}})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := producer.Send(t.Context(), rmq.Message{Topic: topic, Body: body, DeliverAt: due}); err != nil {
				t.Fatal(err)
			}
		}
	}
	environ := environOf(b.db.DSN, endpoints, "LAPSE_ROCKETMQ_TOPIC="+topic, "LAPSE_ROCKETMQ_GROUP="+group,
		"LAPSE_CONSUMER_WORKERS=5", "LAPSE_CONSUMER_BATCH_ORDERS=1")
	free := b.lock(t, "SELECT id FROM orders FOR UPDATE")
	first := spawn(t, environ, "consume")
	first.ready(t)
	send()
	eventually(t, "five cancels wait for their rows", func() bool { return b.waiting(t, "%FOR UPDATE") == 5 })
	first.signal(syscall.SIGTERM)
	eventually(t, "it is stopping", func() bool { _, said := first.line("stopping: finishing what is in hand"); return said })
	free()
	if code := first.wait(t); code != 0 {
		t.Errorf("it ends with %d, want 0", code)
	}
	b.cancelledOnce(t, ids...)
	if regexp.MustCompile(`(?i)is closed|bad connection|"level":"ERROR"`).MatchString(first.stderr.String()) {
		t.Errorf("the log of the stop has errors:\n%s", first.stderr)
	}
	second := spawn(t, environ, "consume")
	second.ready(t)
	send()
	eventually(t, "the second process finds the orders cancelled", func() bool {
		n, _ := second.metric(t, "lapse_outcomes_total", `result="already_cancelled"`)
		return n >= 5
	})
	b.cancelledOnce(t, ids...)
}

func TestWhatCannotBeFinishedInTheGraceIsLeftToTheNextProcess(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.placeWithStock(t, 1, time.Millisecond)
	free := b.lock(t, "SELECT id FROM orders FOR UPDATE")
	const grace = 2 * time.Second
	p := spawn(t, b.environ("LAPSE_SHUTDOWN_GRACE="+grace.String()), "consume")
	p.ready(t)
	b.message(t, ids...)
	eventually(t, "the cancel waits for its row", func() bool { return b.waiting(t, "%FOR UPDATE") == 1 })
	began := time.Now()
	p.signal(syscall.SIGINT)
	p.signal(syscall.SIGTERM) // at once: some supervisors signal the process and its group, which is one wish to stop
	if code := p.wait(t); code != 0 {
		t.Errorf("it ends with %d, want 0: what it has not finished, another consumer does", code)
	}
	if took := time.Since(began); took > grace+time.Second {
		t.Errorf("it took %s to stop, the grace is %s", took, grace)
	}
	if _, said := p.line("stopped with messages in hand; they come again"); !said {
		t.Errorf("it does not say what it left:\n%s", p.stderr)
	}
	free()
	spawn(t, b.environ(), "consume").ready(t)
	eventually(t, "the order is cancelled", func() bool { return b.status(t, ids[0]) == orders.Cancelled })
	b.cancelledOnce(t, ids...)
}

func TestASecondSignalEndsAtOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.placeWithStock(t, 1, time.Millisecond)
	free := b.lock(t, "SELECT id FROM orders FOR UPDATE")
	p := spawn(t, b.environ(), "consume")
	p.ready(t)
	b.message(t, ids...)
	eventually(t, "the cancel waits for its row", func() bool { return b.waiting(t, "%FOR UPDATE") == 1 })
	p.signal(syscall.SIGTERM)
	first := time.Now()
	eventually(t, "it is stopping, and another signal is a second one", func() bool {
		_, said := p.line("stopping: finishing what is in hand")
		return said && time.Since(first) > 2*oneSignal
	})
	began := time.Now()
	p.signal(syscall.SIGTERM)
	if code := p.wait(t); code != 1 {
		t.Errorf("it ends with %d, want 1", code)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("it took %s to end after the second signal", took)
	}
	if !strings.Contains(p.stderr.String(), "second signal (terminated)") {
		t.Errorf("it does not say why it ended:\n%s", p.stderr)
	}
	if got := b.status(t, ids[0]); got != orders.Unpaid {
		t.Errorf("the order is %s, want unpaid: its rows are locked", got)
	}
	free()
}

// relayQuickly is a relay whose lease ends soon, so that a test need not wait long for the next one.
var relayQuickly = []string{"LAPSE_RELAY_LEASE=2s", "LAPSE_RELAY_SEND_TIMEOUT=900ms", "LAPSE_RELAY_LINGER=10ms"}

// case PRD-1
func TestRelayKilledBetweenCommitAndSend(t *testing.T) {
	t.Parallel()
	b := setup(t)
	arrived := make(chan struct{}, 1)
	remove := b.broker.Control(lapsetest.SendMessage, func(ctx context.Context, _ any) (any, error, bool) {
		select {
		case arrived <- struct{}{}:
		default:
		}
		<-ctx.Done() // nothing is stored
		return nil, ctx.Err(), true
	})
	first := spawn(t, b.environ(relayQuickly...), "relay")
	first.ready(t)
	ids := b.placeWithStock(t, 1, 2*time.Second)
	rolledBack := rollBackAnOrder(t, b)
	await(t, arrived, "the send begins")
	first.signal(syscall.SIGKILL)
	if code := first.wait(t); code != -1 {
		t.Fatalf("the relay ends with %d, want a kill", code)
	}
	remove()
	if n := len(b.broker.Sent(testTopic)); n != 0 {
		t.Fatalf("%d messages are stored before the second relay starts, want 0", n)
	}

	spawn(t, b.environ(relayQuickly...), "relay")
	spawn(t, b.environ(), "consume")
	eventually(t, "the order is cancelled", func() bool { return b.status(t, ids[0]) == orders.Cancelled })
	b.cancelledOnce(t, ids...)
	for _, m := range b.broker.Sent(testTopic) {
		if strings.Contains(string(m.Body), orders.FormatID(rolledBack)) {
			t.Errorf("a message was sent for order %d, which was rolled back", rolledBack)
		}
	}
}

// rollBackAnOrder writes an order and its outbox row in a transaction that is rolled back.
func rollBackAnOrder(t *testing.T, b *bundle) int64 {
	t.Helper()
	id := orders.NewID()
	tx, err := b.db.SQL.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, statement := range []string{
		"INSERT INTO orders (id, channel, user_id, currency, amount, status, deadline_at, created_at) VALUES (?, '', '', 'EUR', 0, 'unpaid', UTC_TIMESTAMP(3), UTC_TIMESTAMP(3))",
		"INSERT INTO outbox (order_id, deliver_at, state, available_at, attempts) VALUES (?, UTC_TIMESTAMP(3), 'pending', UTC_TIMESTAMP(3), 0)",
	} {
		if _, err := tx.ExecContext(t.Context(), statement, id); err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	return id
}

func TestRelayKilledBetweenSendAndMark(t *testing.T) {
	t.Parallel()
	b := setup(t)
	// The row is locked when its message arrives: the message is stored, and the mark waits.
	arrived, proceed := make(chan struct{}, 1), make(chan struct{})
	remove := b.broker.Control(lapsetest.SendMessage, func(ctx context.Context, _ any) (any, error, bool) {
		select {
		case arrived <- struct{}{}:
		default:
		}
		select {
		case <-proceed:
		case <-ctx.Done():
		}
		return nil, nil, false
	})
	first := spawn(t, b.environ(relayQuickly...), "relay")
	first.ready(t)
	ids := b.placeWithStock(t, 1, 2*time.Second)
	await(t, arrived, "the send begins")
	free := b.lock(t, "SELECT order_id FROM outbox FOR UPDATE")
	close(proceed)
	eventually(t, "the message is stored and its mark waits", func() bool { return len(b.broker.Sent(testTopic)) == 1 && b.waiting(t, "UPDATE outbox%") == 1 })
	first.signal(syscall.SIGKILL)
	if code := first.wait(t); code != -1 {
		t.Fatalf("the relay ends with %d, want a kill", code)
	}
	remove()
	free()
	if state := b.db.Text(t, "SELECT state FROM outbox WHERE order_id = ?", ids[0]); state != "pending" {
		t.Fatalf("the outbox row is %s, want pending: it was not marked", state)
	}

	spawn(t, b.environ(relayQuickly...), "relay")
	spawn(t, b.environ(), "consume")
	eventually(t, "the message is sent again, and both are acknowledged", func() bool {
		return len(b.broker.Sent(testTopic)) == 2 && len(b.broker.Acked(testGroup)) == 2
	})
	b.cancelledOnce(t, ids...)
}

// case PRD-9
func TestEveryProcessRestartedBetweenOrderAndDeadline(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first := []*process{spawn(t, b.environ(relayQuickly...), "relay"), spawn(t, b.environ(), "consume")}
	for _, p := range first {
		p.ready(t)
	}
	ids := b.placeWithStock(t, 3, 4*time.Second)
	eventually(t, "the rows are marked as sent", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE state = 'sent'") == 3 })
	for _, p := range first {
		p.signal(syscall.SIGKILL)
		p.wait(t)
	}
	for _, id := range ids {
		if got := b.status(t, id); got != orders.Unpaid {
			t.Fatalf("order %d is %s before its deadline", id, got)
		}
	}
	spawn(t, b.environ(relayQuickly...), "relay")
	spawn(t, b.environ(), "consume")
	for _, id := range ids {
		eventually(t, "the order is cancelled", func() bool { return b.status(t, id) == orders.Cancelled })
	}
	b.cancelledOnce(t, ids...)
}

func TestProfilesAreServedOnTheLoopbackWhenAsked(t *testing.T) {
	t.Parallel()
	p := start(t, environOf("u:p@tcp("+closedAddr(t)+")/shop", closedAddr(t), "LAPSE_HTTP_PPROF=127.0.0.1:0", "LAPSE_RELAY_TIK=1s"), "relay")
	p.addr(t)
	if _, said := p.line("the environment variable LAPSE_RELAY_TIK is no setting of lapse; did you mean LAPSE_RELAY_TICK?"); !said {
		t.Errorf("its log does not warn of a variable that is no key:\n%s", p.stderr)
	}
	var addr string
	eventually(t, "profiles are served", func() bool {
		entry, ok := p.line("serving pprof")
		addr, _ = entry["addr"].(string)
		return ok
	})
	if status, body := get(t, "http://"+addr+"/debug/pprof/goroutine?debug=1"); status != http.StatusOK || !strings.Contains(body, "goroutine profile") {
		t.Errorf("it answers %d %.100q", status, body)
	}
	if status, _ := get(t, "http://"+addr+"/metrics"); status != http.StatusNotFound {
		t.Errorf("the address of the profiles serves metrics too: %d", status)
	}
	if status, _ := p.get(t, "/debug/pprof/"); status != http.StatusNotFound {
		t.Errorf("the address of the metrics serves profiles too: %d", status)
	}
}

func TestAnAddressInUseIsNamedWithItsKey(t *testing.T) {
	t.Parallel()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // nothing was written to it
	addr := l.Addr().String()
	code, _, stderr := lapse(t, environOf("u:p@tcp("+closedAddr(t)+")/shop", closedAddr(t)), "consume", "--http-addr", addr)
	if code != 1 || !strings.Contains(stderr, addr) || !strings.Contains(stderr, "http.addr") {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
}

func TestMigrateUpStatusDown(t *testing.T) {
	t.Parallel()
	b := setupEmpty(t)
	expect := func(code int, says string, args ...string) string {
		t.Helper()
		got, stdout, stderr := lapse(t, b.environ(), append([]string{"migrate"}, args...)...)
		if got != code || !strings.Contains(stdout+stderr, says) {
			t.Errorf("migrate %v: exit code %d, %q %q; want %d and %q", args, got, stdout, stderr, code, says)
		}
		return stdout
	}
	newest := strconv.Itoa(migrations.Version)
	files, err := filepath.Glob("../../migrations/sql/*.sql")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	expect(0, strconv.Itoa(len(files))+" pending; apply them with 'lapse migrate up'", "status")
	expect(0, "applied 00001_create_orders.sql\n", "up")
	if out := expect(0, "the schema is at version "+newest+"\n", "up"); strings.Contains(out, "applied") {
		t.Errorf("a second up applies something: %q", out)
	}
	if out := expect(0, "00001_create_orders.sql", "status"); strings.Contains(out, "pending") || strings.Count(out, "\n") != len(files)+1 {
		t.Errorf("status prints %q", out)
	}
	b.db.Exec(t, "INSERT INTO "+migrations.Table+" (version_id, is_applied) VALUES (?, TRUE)", migrations.Version+1)
	expect(0, fmt.Sprintf("the schema is at version %d\na newer build made it", migrations.Version+1), "up")
	b.db.Exec(t, "DELETE FROM "+migrations.Table+" WHERE version_id = ?", migrations.Version+1)
	expect(0, "took back 000"+newest, "down", "--to", strconv.Itoa(migrations.Version-1), "--yes")
	expect(0, "1 pending", "status")
	expect(0, "the schema is at version 0\n", "down", "--to", "0", "--yes")
	if n := b.db.Int(t, "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = ? AND table_name <> ?", b.db.Name, migrations.Table); n != 0 {
		t.Errorf("%d tables are left", n)
	}
	environ := []string{"LAPSE_MYSQL_DSN=" + strings.Replace(b.db.DSN, b.db.Name, b.db.Name+"_not_there", 1)}
	if code, _, stderr := lapse(t, environ, "migrate", "up"); code != 3 || !strings.Contains(stderr, "create it first: CREATE DATABASE `"+b.db.Name+"_not_there`") {
		t.Errorf("on a database that does not exist: exit code %d, %q; want 3 and what to do", code, stderr)
	}
}

func TestCancelByHandSaysWhatBecameOfTheOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.placeWithStock(t, 1, time.Hour)[0]
	paid := b.place(t, orders.NewOrder{Amount: 1}).ID
	if _, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: "g", TransactionID: "1", OrderID: paid, Currency: "EUR", Amount: 1}); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		id   int64
		args []string
		code int
		says string
	}{
		{id, []string{"--reason", orders.ReasonTimeout}, 2, "give your own words"},
		{id, []string{"--reason", "phone", "--actor", " alice"}, 2, "actor"},
		{id, []string{"--reason", "phone"}, 0, fmt.Sprintf("order %d is cancelled, its stock is released\n", id)},
		{id, []string{"--reason", "again"}, 0, fmt.Sprintf("order %d was cancelled before; nothing changed\n", id)},
		{paid, []string{"--reason", "phone"}, 1, fmt.Sprintf("order %d is paid, and stays so", paid)},
		{4711, []string{"--reason", "phone"}, 1, "there is no order 4711"},
	} {
		code, stdout, stderr := lapse(t, b.environ("USER=bob"), append([]string{"cancel", strconv.FormatInt(tc.id, 10)}, tc.args...)...)
		if code != tc.code || !strings.Contains(stdout+stderr, tc.says) {
			t.Errorf("cancel %d %v: exit code %d, %q %q; want %d and %q", tc.id, tc.args, code, stdout, stderr, tc.code, tc.says)
		}
	}
	b.cancelledOnce(t, id)
	events, err := b.store.Events(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if last := events[len(events)-1]; last.Actor != "cli:bob" || !strings.Contains(string(last.Detail), "phone") {
		t.Errorf("the story ends with %+v", last)
	}
}

func await(t *testing.T, ch <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(limit):
		t.Fatalf("after %s still not: %s", limit, what)
	}
}

// proxy stands before a database server. Until it is opened nothing listens at its address.
type proxy struct {
	t            *testing.T
	dsn          string
	addr, server string

	mu    sync.Mutex
	close []io.Closer // guarded by mu
	done  sync.WaitGroup
}

func newProxy(t *testing.T, dsn string) *proxy {
	t.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, addr: closedAddr(t), server: cfg.Addr}
	cfg.Addr = p.addr
	p.dsn = cfg.FormatDSN()
	t.Cleanup(func() {
		p.mu.Lock()
		for _, c := range p.close {
			_ = c.Close()
		}
		p.mu.Unlock()
		p.done.Wait()
	})
	return p
}

func (p *proxy) keep(c io.Closer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.close = append(p.close, c)
}

// open begins to listen.
func (p *proxy) open() {
	p.t.Helper()
	l, err := (&net.ListenConfig{}).Listen(p.t.Context(), "tcp", p.addr)
	if err != nil {
		p.t.Fatal(err)
	}
	p.keep(l)
	p.done.Go(func() { // ended by the cleanup
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", p.server) //nolint:noctx // ended by the cleanup
			if err != nil {
				p.t.Errorf("dial the database: %v", err)
				_ = client.Close()
				continue
			}
			p.keep(client)
			p.keep(server)
			p.done.Go(func() { pipe(server, client) })
			p.done.Go(func() { pipe(client, server) })
		}
	})
}

func pipe(to, from net.Conn) {
	_, err := io.Copy(to, from)
	if err != nil && !errors.Is(err, net.ErrClosed) {
		_ = from.Close()
	}
	_ = to.Close()
}
