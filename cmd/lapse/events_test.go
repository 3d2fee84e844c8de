package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/orders"
)

// case CFG-4: what a policy names keeps its letters, from whichever source it comes.
func TestPoliciesAreReadFromEverySourceAsTheyAreWritten(t *testing.T) {
	t.Parallel()
	want := []orders.Policy{
		{Channel: "Kiosk", Timeout: 10 * time.Minute}, {PaymentMethod: "Bank_Transfer", Never: true}, {Channel: "kiosk", PaymentMethod: "wallet", Timeout: 30 * time.Minute, Grace: 5 * time.Minute},
	}
	const line = "channel=Kiosk timeout=10m; method=Bank_Transfer timeout=never; channel=kiosk method=wallet timeout=30m grace=5m"
	block := "orders:\n  policies: |\n    channel=Kiosk timeout=10m   # those at the door\n    method=Bank_Transfer timeout=never\n\n    channel=kiosk method=wallet timeout=30m grace=5m\n"
	for origin, src := range map[string]sources{
		"file":        {file: writeFile(t, block), named: "--config"},
		"environment": {environ: []string{"LAPSE_ORDERS_POLICIES=" + line}},
		"--set":       {set: []string{"orders.policies=" + line}},
	} {
		cfg := mustLoad(t, src)
		if got := cfg.ordersConfig().Policies; !slices.Equal(got, want) {
			t.Errorf("%s: policies are %v, want %v", origin, got, want)
		}
		// What is printed is a file again, and stands for the same.
		var printed strings.Builder
		if err := cfg.print(&printed); err != nil {
			t.Fatal(err)
		}
		var back struct {
			Orders struct{ Policies string }
		}
		if err := yaml.Unmarshal([]byte(printed.String()), &back); err != nil {
			t.Fatalf("%s: %v in\n%s", origin, err, printed.String())
		}
		if got, err := orders.ParsePolicies(back.Orders.Policies); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: printed are %v, %v, want %v", origin, got, err, want)
		}
	}
}

func TestSettingsOfPoliciesEventsAndRetentionThatDoNotGoTogetherAreRefused(t *testing.T) {
	t.Parallel()
	for says, set := range map[string][]string{
		`"timeout=160h0m0s grace=10h0m0s" has its deadline 170h after placing, later than orders.max_lifetime, 168h`: {"orders.policies=timeout=160h grace=10h"},
		"orders.policies (from --set): \"grace=1h0m0s\" has its deadline 168h30m":                                    {"orders.policies=grace=1h", "orders.timeout=167h30m"},
		"never holds": {"orders.policies=timeout=5m; channel=web timeout=6m"},
		"retention.orders is 25h (from --set) and orders.key_retention is 168h": {"retention.orders=25h"},
		"events.topic is order-timeout (from --set) and rocketmq.topic is":      {"events.topic=order-timeout"},
	} {
		_, err := load(sources{set: set})
		var wrong *configError
		if !errors.As(err, &wrong) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: %v, want %q", set, err, says)
		}
	}
	cfg := mustLoad(t, sources{set: []string{"retention.orders=never", "orders.key_retention=240h"}})
	if words, err := cfg.show(theKeys["retention.orders"]); err != nil || words != "never" || cfg.Retention.Orders != 0 {
		t.Errorf("retention.orders is shown as %q (%v), and is %s", words, err, cfg.Retention.Orders)
	}
}

// rolesOf are the stack's accounts of the parts of lapse all, on the bundle's database.
func (b *bundle) rolesOf(t *testing.T) []string {
	t.Helper()
	var environ []string
	for _, name := range []string{"LAPSE_MYSQL_DSN", "LAPSE_MYSQL_DSN_RELAY", "LAPSE_MYSQL_DSN_CONSUME"} {
		dsn := os.Getenv(name)
		if dsn == "" {
			t.Fatalf(`%s is not set: eval "$(scripts/stack env)"`, name)
		}
		environ = append(environ, name+"="+dsn[:strings.LastIndex(dsn, "/")+1]+b.db.Name)
	}
	return environ
}

// TestAServiceTellsOfEveryChangeAndPurgesWhatIsOld: with events and retention on, by the accounts of the roles, from an order over HTTP to the
// message that tells of its cancel.
func TestAServiceTellsOfEveryChangeAndPurgesWhatIsOld(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const topic = "order-events"
	b.broker.CreateTopic(topic, lapsetest.Normal, 8)
	// What ended long ago, before events were switched on.
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', NULL, 0, 0)")
	old := b.place(t, orders.NewOrder{Amount: 5, Items: []orders.Item{{SKU: "pen", Quantity: 3, Price: 1}}})
	if _, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: "bank", TransactionID: "1", OrderID: old.ID, Currency: "EUR", Amount: 5}); err != nil {
		t.Fatal(err)
	}
	b.db.Exec(t, "UPDATE orders SET paid_at = paid_at - INTERVAL 8 DAY, deadline_at = deadline_at - INTERVAL 8 DAY WHERE id = ?", old.ID)
	b.db.Exec(t, "DELETE FROM outbox")

	p := start(t, b.apiEnviron(append(b.rolesOf(t), "LAPSE_EVENTS_TOPIC="+topic, "LAPSE_EVENTS_SOURCE=/shop",
		"LAPSE_ORDERS_POLICIES=channel=kiosk timeout=1ms", "LAPSE_RETENTION_ORDERS=168h", "LAPSE_RETENTION_INTERVAL=1s")...), "all")
	p.ready(t)
	kiosk := strings.TrimPrefix(p.placeByHTTP(t, `{"channel":"kiosk","payment_method":"cash","currency":"EUR","amount":"990"}`), "/v1/orders/")
	eventually(t, "its cancel is told", func() bool { return len(b.broker.Sent(topic)) >= 2 })
	var told []string
	for _, m := range b.broker.Sent(topic) {
		var e struct {
			ID, Source, Type string
			Data             map[string]any
		}
		if err := json.Unmarshal(m.Body, &e); err != nil {
			t.Fatal(err)
		}
		told = append(told, fmt.Sprintf("%s %s %s %v", e.ID, e.Type, e.Source, e.Data["payment_method"]))
	}
	if want := []string{kiosk + "-1 order.placed /shop cash", kiosk + "-2 order.cancelled /shop cash"}; !slices.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
	eventually(t, "the old order is gone", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE id = ?", old.ID) == 0 })
	checks, err := orders.Audit(t.Context(), b.store.DB(), orders.AuditOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		if c.Violations != 0 {
			t.Errorf("%s %s: %+v", c.Invariant, c.Name, c.Examples)
		}
	}
	for name, labels := range map[string]string{"lapse_retention_purged_total": `what="orders"`, "lapse_events_sent_total": `type="order.cancelled"`, "lapse_ready": `check="events"`} {
		eventually(t, name+" is 1", func() bool {
			n, _ := p.metric(t, name, labels)
			return n == 1
		})
	}
	eventually(t, "no event is shown as pending", func() bool {
		n, shown := p.metric(t, "lapse_events_pending_rows", "")
		return shown && n == 0
	})
}

// TestTheRelayNamesTheTopicOfEventsThatIsMissing, and goes on with its timed messages.
func TestTheRelayNamesTheTopicOfEventsThatIsMissing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := start(t, b.environ("LAPSE_EVENTS_TOPIC=no-such-topic"), "relay")
	o := b.place(t, orders.NewOrder{Timeout: time.Hour})
	eventually(t, "the timed message is sent", func() bool { return b.db.Text(t, "SELECT state FROM outbox WHERE order_id = ?", o.ID) == "sent" })
	eventually(t, "/readyz names the topic", func() bool {
		status, body := p.get(t, "/readyz")
		return status != 200 && strings.Contains(body, "no-such-topic")
	})
}

// TestARelayKilledBetweenSendAndMarkOfAnEventSendsItAgain under the same id, and the order's next event after it.
func TestARelayKilledBetweenSendAndMarkOfAnEventSendsItAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const topic = "order-events"
	b.broker.CreateTopic(topic, lapsetest.Normal, 8)
	loud, err := orders.Open(b.db.DSN, orders.Config{MaxOpenConns: 2, Events: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = loud.Close() }()
	// No deadline: there is no other message than those that tell of the order.
	o, err := loud.Place(t.Context(), orders.NewOrder{Currency: "EUR", Amount: 100, NoDeadline: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := loud.RecordPayment(t.Context(), orders.Payment{Gateway: "bank", TransactionID: "1", OrderID: o.ID, Currency: "EUR", Amount: 100}); err != nil {
		t.Fatal(err)
	}
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
	environ := b.environ(append(slices.Clone(relayQuickly), "LAPSE_EVENTS_TOPIC="+topic)...)
	first := spawn(t, environ, "relay")
	await(t, arrived, "the send begins")
	free := b.lock(t, "SELECT id FROM event_outbox FOR UPDATE")
	close(proceed)
	eventually(t, "the event is stored and its mark waits", func() bool { return len(b.broker.Sent(topic)) == 1 && b.waiting(t, "UPDATE event_outbox%") == 1 })
	first.signal(syscall.SIGKILL)
	if code := first.wait(t); code != -1 {
		t.Fatalf("the relay ends with %d, want a kill", code)
	}
	remove()
	free()
	if n := b.db.Int(t, "SELECT COUNT(*) FROM event_outbox WHERE state = 'sent'"); n != 0 {
		t.Fatalf("%d events are marked sent, want none", n)
	}
	spawn(t, environ, "relay")
	eventually(t, "both events are sent and marked", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM event_outbox WHERE state = 'sent'") == 2 })
	var told []string
	for _, m := range b.broker.Sent(topic) {
		var e struct{ ID string }
		if err := json.Unmarshal(m.Body, &e); err != nil {
			t.Fatal(err)
		}
		told = append(told, e.ID)
	}
	if want := []string{fmt.Sprintf("%d-1", o.ID), fmt.Sprintf("%d-1", o.ID), fmt.Sprintf("%d-2", o.ID)}; !slices.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
}
