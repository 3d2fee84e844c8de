package api

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

func TestAnOrderIsPlacedReadExtendedPaidAndTold(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('tea', 10, 0, 0), ('cup', NULL, 0, 0)")
	a := b.placeWith(t, key(), `{"channel":"web","payment_method":"card","user_id":"u-1","currency":"EUR","amount":"9007199254740993",
		"items":[{"sku":"tea","quantity":2,"price":"495"},{"sku":"cup","quantity":1,"price":"0"},{"sku":"tea","quantity":1.0,"price":"495"}],"timeout_seconds":600}`)
	if a.status != http.StatusCreated || a.header.Get(replayedHeader) != "" {
		t.Fatalf("place: %d %s %v", a.status, a.body, a.header)
	}
	var o orderAnswer
	a.decode(t, &o)
	if got, want := a.header.Get("Location"), pathOf(o); got != want {
		t.Errorf("Location is %q, want %q", got, want)
	}
	if got := o.DeadlineAt.Sub(o.CreatedAt.Time); got != 10*time.Minute {
		t.Errorf("the deadline is %s after placing, want 10m", got)
	}
	want := fmt.Sprintf(`{"id":"%d","channel":"web","payment_method":"card","user_id":"u-1","currency":"EUR","amount":"9007199254740993","status":"unpaid","pay_by":"%[2]s","deadline_at":"%[2]s","created_at":"%[3]s","items":[{"sku":"cup","quantity":1,"price":"0"},{"sku":"tea","quantity":3,"price":"495"}]}`+"\n",
		o.ID, o.DeadlineAt.Format("2006-01-02T15:04:05.000Z"), o.CreatedAt.Format("2006-01-02T15:04:05.000Z"))
	if a.body != want {
		t.Errorf("the answer is\n%s\nwant\n%s", a.body, want)
	}
	if got := b.get(t, pathOf(o)); got.status != http.StatusOK || got.body != want {
		t.Errorf("reading it gives %d\n%s\nwant\n%s", got.status, got.body, want)
	}
	if got := b.do(t, request{method: http.MethodHead, path: pathOf(o)}); got.status != http.StatusOK || got.body != "" {
		t.Errorf("HEAD gives %d and %d bytes", got.status, len(got.body))
	}

	until := o.DeadlineAt.Add(time.Hour)
	for range 2 { // the second changes nothing and is no error
		x := b.post(t, o, "extend", fmt.Sprintf(`{"deadline_at":%q}`, until.In(time.FixedZone("", 8*3600)).Format(time.RFC3339Nano)))
		if want := fmt.Sprintf(`{"order_id":"%d","status":"unpaid","deadline_at":%q}`+"\n", o.ID, until.Format("2006-01-02T15:04:05.000Z")); x.status != http.StatusOK || x.body != want {
			t.Errorf("extend: %d %s, want %s", x.status, x.body, want)
		}
	}
	pay := `{"gateway":"bank","transaction_id":"T-1","currency":"EUR","amount":"9007199254740994","paid_at":"2026-11-30T15:00:00+01:00"}`
	for _, repeated := range []bool{false, true} {
		p := b.post(t, o, "payments", pay)
		if want := fmt.Sprintf(`{"outcome":"accepted","repeated":%t,"refund":"1","refund_reason":"excess"}`+"\n", repeated); p.status != http.StatusOK || p.body != want {
			t.Errorf("pay: %d %s, want %s", p.status, p.body, want)
		}
	}
	var paid orderAnswer
	b.get(t, pathOf(o)).decode(t, &paid)
	if paid.Status != orders.Paid || paid.PaidAt == nil || !paid.DeadlineAt.Equal(until) {
		t.Errorf("after the payment the order is %+v", paid)
	}

	var story eventsAnswer
	e := b.get(t, pathOf(o)+"/events")
	e.decode(t, &story)
	var kinds, actors []string
	for _, event := range story.Events {
		kinds, actors = append(kinds, event.Kind), append(actors, event.Actor)
	}
	if got := strings.Join(kinds, " ") + "|" + strings.Join(actors, " "); story.OrderID != o.ID || got != "placed extended paid refund|checkout api:shop gateway:bank gateway:bank" {
		t.Errorf("the story is %s", e.body)
	}
}

func TestACancelByHandReleasesOnceAndSaysWhatWasFinalBefore(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('tea', 10, 0, 0)")
	o := b.place(t, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":4,"price":"1"}],"no_deadline":true}`)
	if o.DeadlineAt != nil {
		t.Errorf("an order without deadline has one: %v", o.DeadlineAt)
	}
	for _, repeated := range []bool{false, true} {
		a := b.post(t, o, "cancel", `{"reason":"asked by phone"}`)
		if want := fmt.Sprintf(`{"order_id":"%d","status":"cancelled","repeated":%t}`+"\n", o.ID, repeated); a.status != http.StatusOK || a.body != want {
			t.Errorf("cancel: %d %s, want %s", a.status, a.body, want)
		}
	}
	if n := b.db.Int(t, "SELECT available FROM stock"); n != 10 {
		t.Errorf("%d are available, want 10", n)
	}
	var late payAnswer
	b.post(t, o, "payments", `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"5"}`).decode(t, &late)
	if late != (payAnswer{Outcome: orders.PaymentLate, Refund: 5, RefundReason: "late"}) {
		t.Errorf("money for a cancelled order gets %+v", late)
	}
	var x orderAnswer
	b.get(t, pathOf(o)).decode(t, &x)
	if x.Status != orders.Cancelled || x.CancelReason != "asked by phone" || x.CancelledAt == nil {
		t.Errorf("the order is %+v", x)
	}
	if got := b.db.Text(t, "SELECT actor FROM order_events WHERE kind = 'cancelled'"); got != "api:shop" {
		t.Errorf("the actor is %q", got)
	}
	a := b.post(t, o, "extend", `{"deadline_at":"2030-01-01T00:00:00Z"}`)
	if p := a.problem(t); a.kind(t) != "order-final" || p.OrderStatus != orders.Cancelled {
		t.Errorf("extending a cancelled order: %s", a.body)
	}
	paid := b.place(t, `{"currency":"EUR","amount":"5"}`)
	b.post(t, paid, "payments", `{"gateway":"bank","transaction_id":"T2","currency":"EUR","amount":"5"}`)
	for verb, body := range map[string]string{"cancel": `{"reason":"x"}`, "extend": `{"deadline_at":"2030-01-01T00:00:00Z"}`} {
		a := b.post(t, paid, verb, body)
		if p := a.problem(t); a.status != http.StatusConflict || p.OrderStatus != orders.Paid {
			t.Errorf("%s of a paid order: %d %s", verb, a.status, a.body)
		}
	}
}

func TestWhyAnswersInASentenceAndInTime(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(t, `{"channel":"web","user_id":"u-1","currency":"EUR","amount":"5","timeout_seconds":600}`)
	b.db.Exec(t, "UPDATE outbox SET state = 'sent', message_id = '01AB', sent_at = UTC_TIMESTAMP(3), deliver_at = deliver_at + INTERVAL 50000 MICROSECOND")
	ask := func() (w struct {
		Cause, Answer, Next string
		At                  time.Time
		Order               struct{ Status, Amount string }
		Entries             []struct{ Kind, Actor, Text string }
	}) {
		t.Helper()
		b.token = readToken
		defer func() { b.token = allToken }()
		a := b.get(t, pathOf(o)+"/why")
		if a.status != http.StatusOK {
			t.Fatalf("%d %s", a.status, a.body)
		}
		a.decode(t, &w)
		return w
	}
	if w := ask(); w.Cause != "waiting" || !strings.HasPrefix(w.Answer, "Not cancelled yet: the timed message is due in ") || w.Order.Status != "unpaid" || w.Order.Amount != "5" || len(w.Entries) != 4 {
		t.Errorf("%+v", w)
	}
	b.post(t, o, "payments", `{"gateway":"bank","transaction_id":"T<1>","currency":"EUR","amount":"5"}`)
	if w := ask(); w.Cause != "paid_in_time" || !strings.HasSuffix(w.Answer, "before the deadline (transaction T<1> of bank).") || w.Entries[len(w.Entries)-3].Actor != "gateway:bank" {
		t.Errorf("%+v", w)
	}
	b.token = payToken
	if a := b.get(t, pathOf(o)+"/why"); a.kind(t) != "forbidden" {
		t.Errorf("without the scope: %d %s", a.status, a.body)
	}
	b.token = allToken
	if err := b.store.Park(t.Context(), orders.Parked{What: orders.ParkedOrder, Ref: "77", Reason: "it was never here"}); err != nil {
		t.Fatal(err)
	}
	if a := b.get(t, "/v1/orders/77/why"); a.kind(t) != "unknown-order" || !strings.Contains(a.problem(t).Detail, "it was never here") {
		t.Errorf("an id that was parked without an order: %d %s", a.status, a.body)
	}
}

// Every endpoint with every sort of input that it must refuse.
func TestEveryEndpointRefusesWhatIsWrong(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('tea', 10, 0, 0)")
	o := b.place(t, `{"id":"41","currency":"EUR","amount":"5"}`)
	b.post(t, o, "payments", `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"5"}`)
	b.place(t, `{"id":"42","currency":"EUR","amount":"5"}`)
	b.place(t, `{"id":"43","currency":"EUR","amount":"5","no_deadline":true}`)
	const (
		place  = "POST /v1/orders"
		pay    = "POST /v1/orders/42/payments"
		extend = "POST /v1/orders/42/extend"
		cancel = "POST /v1/orders/42/cancel"
	)
	type bad struct {
		name, what, body string
		kind             string
		onSchema         bool // the description cannot say that it is wrong
		header           map[string]string
	}
	list := []bad{
		{"no currency", place, `{"amount":"5"}`, "malformed", false, nil},
		{"empty currency", place, `{"currency":"","amount":"5"}`, "malformed", false, nil},
		{"long currency", place, `{"currency":"12345678901234567","amount":"5"}`, "invalid", false, nil},
		{"no amount", place, `{"currency":"EUR"}`, "malformed", false, nil},
		{"an amount that is a number", place, `{"currency":"EUR","amount":5}`, "malformed", false, nil},
		{"a negative amount", place, `{"currency":"EUR","amount":"-5"}`, "malformed", false, nil},
		{"an amount with a fraction", place, `{"currency":"EUR","amount":"5.00"}`, "malformed", false, nil},
		{"an amount with a zero before it", place, `{"currency":"EUR","amount":"05"}`, "malformed", false, nil},
		{"an amount with a plus", place, `{"currency":"EUR","amount":"+5"}`, "malformed", false, nil},
		{"an amount of 19 digits", place, `{"currency":"EUR","amount":"1000000000000000000"}`, "malformed", false, nil},
		{"an empty amount", place, `{"currency":"EUR","amount":""}`, "malformed", false, nil},
		{"an id that is a number", place, `{"id":7,"currency":"EUR","amount":"5"}`, "malformed", false, nil},
		{"the id 0", place, `{"id":"0","currency":"EUR","amount":"5"}`, "malformed", false, nil},
		{"an id beyond 2^63", place, `{"id":"9223372036854775808","currency":"EUR","amount":"5"}`, "malformed", false, nil},
		{"an id that is taken", place, `{"id":"41","currency":"EUR","amount":"5"}`, "order-exists", true, nil},
		{"a time that was never set", place, `{"currency":"EUR","amount":"5","deadline_at":"0001-01-01T00:00:00Z"}`, "malformed", true, nil},
		{"a null", place, `{"currency":"EUR","amount":"5","deadline_at":null}`, "malformed", false, nil},
		{"an unknown member", place, `{"currency":"EUR","amount":"5","timeout":30}`, "malformed", false, nil},
		{"a member in another case", place, `{"currency":"EUR","amount":"5","Channel":"web"}`, "malformed", false, nil},
		{"a member that folds to ours", place, `{"currency":"EUR","amount":"5","uſer_id":"web"}`, "malformed", false, nil},
		{"an unknown member of an item", place, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":1,"price":"1","name":"Tea"}]}`, "malformed", false, nil},
		{"a member twice", place, `{"currency":"EUR","amount":"5","amount":"6"}`, "malformed", true, nil},
		{"a member twice, once escaped", place, `{"currency":"EUR","amount":"5","\u0061mount":"6"}`, "malformed", true, nil},
		{"a text for items", place, `{"currency":"EUR","amount":"5","items":"tea"}`, "malformed", false, nil},
		{"a number for a channel", place, `{"channel":1,"currency":"EUR","amount":"5"}`, "malformed", false, nil},
		{"a long channel", place, `{"channel":"` + strings.Repeat("é", 65) + `","currency":"EUR","amount":"5"}`, "invalid", false, nil},
		{"a channel with a blank at its end", place, `{"channel":"web ","currency":"EUR","amount":"5"}`, "invalid", true, nil},
		{"a user id with a control character", place, `{"user_id":"a\u0000b","currency":"EUR","amount":"5"}`, "invalid", true, nil},
		{"half a surrogate pair", place, `{"user_id":"a\ud800","currency":"EUR","amount":"5"}`, "invalid", true, nil},
		{"no SKU", place, `{"currency":"EUR","amount":"5","items":[{"quantity":1,"price":"1"}]}`, "malformed", false, nil},
		{"no quantity", place, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","price":"1"}]}`, "malformed", false, nil},
		{"a quantity of 0", place, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":0,"price":"1"}]}`, "malformed", false, nil},
		{"half a piece", place, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":0.5,"price":"1"}]}`, "malformed", false, nil},
		{"a quantity that is a text", place, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":"1","price":"1"}]}`, "malformed", false, nil},
		{"a quantity beyond all numbers", place, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":1e400,"price":"1"}]}`, "malformed", false, nil},
		{"no price", place, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":1}]}`, "malformed", false, nil},
		{"one SKU with two prices", place, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":1,"price":"1"},{"sku":"tea","quantity":1,"price":"2"}]}`, "invalid", true, nil},
		{"too many items", place, `{"currency":"EUR","amount":"5","items":[` + strings.Repeat(`{"sku":"tea","quantity":1,"price":"1"},`, 500) + `{"sku":"tea","quantity":1,"price":"1"}]}`, "malformed", false, nil},
		{"more than is available", place, `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":11,"price":"1"}]}`, "out-of-stock", true, nil},
		{"an unknown SKU", place, `{"currency":"EUR","amount":"5","items":[{"sku":"Tea","quantity":1,"price":"1"}]}`, "unknown-sku", true, nil},
		{"a time-out of 0", place, `{"currency":"EUR","amount":"5","timeout_seconds":0}`, "malformed", false, nil},
		{"a time-out that is a text", place, `{"currency":"EUR","amount":"5","timeout_seconds":"60"}`, "malformed", false, nil},
		{"a time-out of centuries", place, `{"currency":"EUR","amount":"5","timeout_seconds":99999999999}`, "malformed", false, nil},
		{"a deadline beyond the lifetime", place, `{"currency":"EUR","amount":"5","timeout_seconds":604801}`, "invalid", true, nil},
		{"a deadline without zone", place, `{"currency":"EUR","amount":"5","deadline_at":"2026-11-30T15:00:00"}`, "malformed", false, nil},
		{"a deadline on no day", place, `{"currency":"EUR","amount":"5","deadline_at":"2026-02-30T15:00:00Z"}`, "malformed", false, nil},
		{"a deadline as a number", place, `{"currency":"EUR","amount":"5","deadline_at":1796050800}`, "malformed", false, nil},
		{"deadline and time-out", place, `{"currency":"EUR","amount":"5","deadline_at":"2026-12-01T15:00:00Z","timeout_seconds":1}`, "invalid", true, nil},
		{"time-out and no deadline", place, `{"currency":"EUR","amount":"5","no_deadline":true,"timeout_seconds":1}`, "invalid", true, nil},
		{"no key", place, `{"currency":"EUR","amount":"5"}`, "malformed", false, map[string]string{keyHeader: ""}},
		{"a key of 129 characters", place, `{"currency":"EUR","amount":"5"}`, "malformed", false, map[string]string{keyHeader: strings.Repeat("k", 129)}},
		{"a key with a blank", place, `{"currency":"EUR","amount":"5"}`, "malformed", false, map[string]string{keyHeader: "a b"}},
		{"a key that is not ASCII", place, `{"currency":"EUR","amount":"5"}`, "malformed", false, map[string]string{keyHeader: "schlüssel"}},

		{"no gateway", pay, `{"transaction_id":"T","currency":"EUR","amount":"5"}`, "malformed", false, nil},
		{"no transaction", pay, `{"gateway":"bank","currency":"EUR","amount":"5"}`, "malformed", false, nil},
		{"no currency", pay, `{"gateway":"bank","transaction_id":"U","amount":"5"}`, "malformed", false, nil},
		{"no amount", pay, `{"gateway":"bank","transaction_id":"U","currency":"EUR"}`, "malformed", false, nil},
		{"an amount of 0", pay, `{"gateway":"bank","transaction_id":"U","currency":"EUR","amount":"0"}`, "malformed", false, nil},
		{"a time that is none", pay, `{"gateway":"bank","transaction_id":"U","currency":"EUR","amount":"5","paid_at":"yesterday"}`, "malformed", false, nil},
		{"a gateway with a blank before it", pay, `{"gateway":" bank","transaction_id":"U","currency":"EUR","amount":"5"}`, "invalid", true, nil},
		{"a time before all money", pay, `{"gateway":"bank","transaction_id":"U","currency":"EUR","amount":"5","paid_at":"1066-10-14T09:00:00Z"}`, "invalid", true, nil},
		{"a notice that contradicts", pay, `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"5"}`, "payment-conflict", true, nil},
		{"a notice for no order", "POST /v1/orders/44/payments", `{"gateway":"bank","transaction_id":"U","currency":"EUR","amount":"5"}`, "unknown-order", true, nil},

		{"no deadline", extend, `{}`, "malformed", false, nil},
		{"a deadline in the past", extend, `{"deadline_at":"2020-01-01T00:00:00Z"}`, "invalid", true, nil},
		{"a deadline beyond the lifetime", extend, `{"deadline_at":"2126-01-01T00:00:00Z"}`, "invalid", true, nil},
		{"an order without deadline", "POST /v1/orders/43/extend", `{"deadline_at":"2126-01-01T00:00:00Z"}`, "invalid", true, nil},
		{"a paid order", "POST /v1/orders/41/extend", `{"deadline_at":"2126-01-01T00:00:00Z"}`, "order-final", true, nil},
		{"no order", "POST /v1/orders/44/extend", `{"deadline_at":"2126-01-01T00:00:00Z"}`, "unknown-order", true, nil},

		{"no reason", cancel, `{}`, "malformed", false, nil},
		{"an empty reason", cancel, `{"reason":""}`, "malformed", false, nil},
		{"a blank reason", cancel, `{"reason":" "}`, "invalid", true, nil},
		{"the reason of a time-out", cancel, `{"reason":"Timeout"}`, "invalid", true, nil},
		{"a long reason", cancel, `{"reason":"` + strings.Repeat("x", 256) + `"}`, "malformed", false, nil},
		{"a paid order", "POST /v1/orders/41/cancel", `{"reason":"x"}`, "order-final", true, nil},
		{"no order", "POST /v1/orders/44/cancel", `{"reason":"x"}`, "unknown-order", true, nil},

		{"no order", "GET /v1/orders/44", "", "unknown-order", true, nil},
		{"no order", "GET /v1/orders/44/events", "", "unknown-order", true, nil},
		{"no order", "GET /v1/orders/44/why", "", "unknown-order", true, nil},
		{"a negative id", "GET /v1/orders/-41/why", "", "unknown-order", false, nil},
		{"a body to it", "POST /v1/orders/41/why", "{}", "method-not-allowed", false, nil},
		{"an id with a zero before it", "GET /v1/orders/041", "", "unknown-order", false, nil},
		{"an id that is none", "GET /v1/orders/tea", "", "unknown-order", false, nil},
		{"an id beyond 2^63", "GET /v1/orders/9223372036854775808", "", "unknown-order", true, nil},
		{"an id with a slash in it", "GET /v1/orders/4%2F1", "", "unknown-order", false, nil},
		{"a negative id", "GET /v1/orders/-41/events", "", "unknown-order", false, nil},
		{"an id that is none", "POST /v1/orders/0/cancel", `{"reason":"x"}`, "unknown-order", false, nil},
		{"nothing", "GET /v1", "", "no-such-path", false, nil},
		{"nothing at the root", "GET /", "", "no-such-path", false, nil},
		{"a slash too many", "GET /v1/orders/41/", "", "no-such-path", true, nil},
		{"two slashes", "POST //v1/orders", `{"currency":"EUR","amount":"5"}`, "no-such-path", false, nil},
		{"a path with dots", "GET /v1/orders/../orders/41", "", "no-such-path", false, nil},
		{"the metrics", "GET /metrics", "", "no-such-path", false, nil},
		{"the orders", "GET /v1/orders", "", "method-not-allowed", false, nil},
		{"another method", "DELETE /v1/orders/41", "", "method-not-allowed", false, nil},
		{"an invented method", "CANCEL /v1/orders/41", "", "method-not-allowed", false, nil},
		{"a reading payment", "GET /v1/orders/41/payments", "", "method-not-allowed", false, nil},
		{"a preflight", "OPTIONS /v1/orders", "", "method-not-allowed", false, nil},
	}
	// What no endpoint with a body takes.
	for _, what := range []string{place, pay, extend, cancel} {
		for _, body := range []struct{ name, body, kind string }{
			{"nothing", "", "malformed"}, {"blanks", " \n", "malformed"}, {"no JSON", "currency=EUR", "malformed"}, {"half of it", `{"currency":"EUR"`, "malformed"},
			{"two documents", `{} {}`, "malformed"}, {"rubbish after it", `{}]`, "malformed"}, {"an array", `[{}]`, "malformed"}, {"a text", `"{}"`, "malformed"}, {"null", `null`, "malformed"},
			{"a number", `1`, "malformed"}, {"deep nesting", strings.Repeat(`{"items":`, 9) + "1" + strings.Repeat("}", 9), "malformed"}, {"deep arrays", `{"items":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `}`, "malformed"},
			{"what is not UTF-8", "{\"currency\":\"\xff\"}", "malformed"},
			{"too much", `{"currency":"` + strings.Repeat("x", 256<<10) + `"}`, "body-too-large"},
		} {
			list = append(list, bad{"body: " + body.name, what, body.body, body.kind, false, map[string]string{"any": "body"}})
		}
		for _, declared := range []string{"", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin1", "application/xml", "json"} {
			list = append(list, bad{"declared as " + declared, what, `{"currency":"EUR","amount":"5"}`, "unsupported-media-type", false, map[string]string{"any": "body", "Content-Type": declared}})
		}
		list = append(list, bad{"compressed", what, `{"currency":"EUR","amount":"5"}`, "unsupported-media-type", false, map[string]string{"any": "body", "Content-Encoding": "gzip"}})
	}
	before := b.state(t)
	for _, tc := range list {
		t.Run(tc.name+" to "+tc.what, func(t *testing.T) {
			method, path, _ := strings.Cut(tc.what, " ")
			header := map[string]string{}
			if tc.what == place {
				header[keyHeader] = key()
			}
			for name, value := range tc.header {
				header[name] = value
			}
			_, anyBody := tc.header["any"]
			a := b.do(t, request{method: method, path: path, body: tc.body, header: header, offSchema: !tc.onSchema && !anyBody, anyBody: anyBody})
			if got := a.kind(t); got != tc.kind {
				t.Errorf("the answer is %d %q, want %s", a.status, a.body, tc.kind)
			}
			if a.status == http.StatusMethodNotAllowed && a.header.Get("Allow") == "" {
				t.Error("405 without Allow")
			}
		})
	}
	if after := b.state(t); after != before {
		t.Errorf("what was refused has left something behind: %s, and before %s", after, before)
	}
}

// state is the number of rows of every table that a refused request must not touch.
func (b *bundle) state(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, table := range []string{"orders", "order_items", "stock_ledger", "payments", "refunds", "outbox", "order_events", "idempotency_keys"} {
		fmt.Fprintf(&all, "%s %d, ", table, b.db.Int(t, "SELECT COUNT(*) FROM "+table))
	}
	return all.String()
}

func TestOutOfStockNamesTheSKUAndWhatIsLeft(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('tea', 3, 0, 0)")
	a := b.placeWith(t, key(), `{"currency":"EUR","amount":"5","items":[{"sku":"tea","quantity":4,"price":"1"}]}`)
	if p := a.problem(t); a.status != http.StatusConflict || p.SKU != "tea" || p.Available == nil || *p.Available != 3 {
		t.Errorf("%d %s", a.status, a.body)
	}
	a = b.placeWith(t, key(), `{"currency":"EUR","amount":"5","items":[{"sku":"cup","quantity":4,"price":"1"}]}`)
	if p := a.problem(t); a.status != http.StatusUnprocessableEntity || p.SKU != "cup" || p.Available != nil {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestJSONMayBeDeclaredInEveryWayThatMeansIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, declared := range []string{"application/json", "Application/JSON", "application/json;", "application/json; charset=utf-8", `application/json;charset="UTF-8"`} {
		a := b.do(t, request{method: http.MethodPost, path: "/v1/orders", body: `{"currency":"EUR","amount":"5"}`, header: map[string]string{keyHeader: key(), "Content-Type": declared}})
		if a.status != http.StatusCreated {
			t.Errorf("%s: %d %s", declared, a.status, a.body)
		}
	}
}

func TestATraceTravelsWithTheOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for sent, want := range map[string]string{good: good, good + "-extra": "", "nonsense": "", "": ""} {
		a := b.do(t, request{method: http.MethodPost, path: "/v1/orders", body: `{"currency":"EUR","amount":"5"}`, header: map[string]string{keyHeader: key(), "Traceparent": sent}})
		var o orderAnswer
		a.decode(t, &o)
		if got := b.db.Text(t, "SELECT traceparent FROM outbox WHERE order_id = ?", int64(o.ID)); got != want {
			t.Errorf("traceparent %q is stored as %q, want %q", sent, got, want)
		}
	}
}

func TestDeepBodiesAreRefusedBeforeTheyAreTaken(t *testing.T) {
	t.Parallel()
	nested := func(levels int) []byte {
		return []byte(strings.Repeat(`{"items":[`, levels/2) + strings.Repeat(`]}`, levels/2))
	}
	for levels, deep := range map[int]bool{maxDepth: false, maxDepth + 2: true, 5000: true} {
		p := checkShape(nested(levels))
		if (p != nil) != deep || deep && !strings.Contains(p.Detail, "nested deeper than 8 levels") {
			t.Errorf("%d levels: %+v", levels, p)
		}
	}
}
