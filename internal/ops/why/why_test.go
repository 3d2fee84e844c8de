package why

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

var update = flag.Bool("update", false, "write the golden file anew")

// now is where the database's clock stands in every story.
var now = time.Date(2026, 11, 30, 15, 0, 0, 0, time.UTC)

func at(d time.Duration) time.Time   { return now.Add(d) }
func ptr(d time.Duration) *time.Time { t := at(d); return &t }

// rfc is how an instant stands in an event's detail.
func rfc(d time.Duration) string { return at(d).Format(time.RFC3339Nano) }

// story begins one: an unpaid order, placed half an hour before a deadline that lies this far from now; a day ago, where that would be ahead.
func story(deadline time.Duration, more ...func(*orders.Story)) orders.Story {
	placed := deadline - 30*time.Minute
	if placed > 0 {
		placed = -25 * time.Hour
	}
	s := orders.Story{ID: 17, Now: now, Order: &orders.Order{ID: 17, Channel: "web", UserID: "u-1", Currency: "EUR", Amount: 990, Status: orders.Unpaid, CreatedAt: at(placed), DeadlineAt: ptr(deadline)}}
	s.Events = []orders.Event{happened(placed, orders.EventPlaced, "checkout", `{"amount":"990","currency":"EUR","deadline_at":%q}`, rfc(deadline))}
	for _, m := range more {
		m(&s)
	}
	return s
}

func happened(d time.Duration, kind, actor, detail string, args ...any) orders.Event {
	return orders.Event{OrderID: 17, At: at(d), Kind: kind, Actor: actor, Detail: json.RawMessage(fmt.Sprintf(detail, args...))}
}

func event(d time.Duration, kind, actor, detail string, args ...any) func(*orders.Story) {
	return func(s *orders.Story) { s.Events = append(s.Events, happened(d, kind, actor, detail, args...)) }
}

func exempt(s *orders.Story) {
	s.Order.DeadlineAt = nil
	s.Events[0].Detail = json.RawMessage(`{"amount":"990","currency":"EUR","deadline_at":null}`)
}

// sent says that the timed message was sent then, for due.
func sent(d, due time.Duration) func(*orders.Story) {
	return func(s *orders.Story) {
		s.Outbox = &orders.OutboxRow{OrderID: 17, DeliverAt: at(due), State: "sent", AvailableAt: at(d + 48*time.Hour), MessageID: "01AB", SentAt: ptr(d)}
	}
}

// pending says that the message waits to be sent from then on.
func pending(from time.Duration, change ...func(*orders.OutboxRow)) func(*orders.Story) {
	return func(s *orders.Story) {
		s.Outbox = &orders.OutboxRow{OrderID: 17, DeliverAt: *s.Order.DeadlineAt, State: "pending", AvailableAt: at(from)}
		for _, c := range change {
			c(s.Outbox)
		}
	}
}

func failed(r *orders.OutboxRow)   { r.Attempts, r.LastError = 7, "send: connection refused" }
func leased(r *orders.OutboxRow)   { r.Leased = true }
func sentOnce(r *orders.OutboxRow) { r.MessageID, r.SentAt = "01AB", ptr(-time.Hour) }

// refused says that the broker refuses the message for good, as the relay leaves it.
func refused(state string) func(*orders.Story) {
	return func(s *orders.Story) {
		s.Outbox = &orders.OutboxRow{OrderID: 17, DeliverAt: *s.Order.DeadlineAt, State: "parked", AvailableAt: now, Attempts: 1, LastError: "code 40012: message too large"}
		parked(orders.ParkedOrder, "17", "code 40012: message too large", state)(s)
	}
}

// parked adds what was parked 20 minutes ago.
func parked(what, ref, reason, state string) func(*orders.Story) {
	return func(s *orders.Story) {
		p := orders.ParkedRow{ID: 4, Parked: orders.Parked{What: what, Ref: ref, Reason: reason}, Times: 1, FirstAt: at(-20 * time.Minute), LastAt: at(-20 * time.Minute), State: state}
		if state != orders.StateParked {
			p.HandledAt, p.HandledBy = ptr(-10*time.Minute), "cli:ann"
		}
		if state == orders.StateDiscarded {
			p.HandledReason = "a trial order"
		}
		s.Parked = append(s.Parked, p)
	}
}

func paid(d time.Duration) func(*orders.Story) {
	return func(s *orders.Story) {
		s.Order.Status, s.Order.PaidAt = orders.Paid, ptr(d)
		s.Payments = append(s.Payments, orders.RecordedPayment{Gateway: "bank", TransactionID: "T-1", Currency: "EUR", Amount: 990, ReceivedAt: at(d), Outcome: orders.PaymentAccepted})
		event(d, orders.EventPaid, "gateway:bank", `{"gateway":"bank","transaction_id":"T-1","amount":"990","currency":"EUR"}`)(s)
	}
}

func timedOut(d, late time.Duration) func(*orders.Story) {
	return func(s *orders.Story) {
		s.Order.Status, s.Order.CancelledAt, s.Order.CancelReason = orders.Cancelled, ptr(d), orders.ReasonTimeout
		event(d, orders.EventCancelled, "lapse", `{"reason":"timeout","lateness_ms":%d}`, late.Milliseconds())(s)
	}
}

func byHand(d time.Duration) func(*orders.Story) {
	return func(s *orders.Story) {
		s.Order.Status, s.Order.CancelledAt, s.Order.CancelReason = orders.Cancelled, ptr(d), "customer asked by phone"
		event(d, orders.EventCancelled, "cli:ann", `{"reason":"customer asked by phone"}`)(s)
	}
}

func reconciled(d time.Duration, missed orders.Missed, because string) func(*orders.Story) {
	return event(d, orders.EventReconciled, "lapse", `{"run":7,"missed":%q,"because":%q}`, missed, because)
}

// refund adds money that came then and cannot stay.
func refund(d time.Duration, reason, state string, change ...func(*orders.RecordedRefund)) func(*orders.Story) {
	return func(s *orders.Story) {
		r := orders.RecordedRefund{Gateway: "bank", TransactionID: fmt.Sprintf("T-%d", len(s.Refunds)+2), Currency: "EUR", Amount: 990, Reason: reason, State: state, CreatedAt: at(d), AvailableAt: at(d)}
		for _, c := range change {
			c(&r)
		}
		s.Refunds = append(s.Refunds, r)
		if reason != orders.RefundExcess {
			s.Payments = append(s.Payments, orders.RecordedPayment{Gateway: r.Gateway, TransactionID: r.TransactionID, Currency: r.Currency, Amount: r.Amount, ReceivedAt: at(d), Outcome: orders.PaymentOutcome(reason)})
		}
		event(d, orders.EventRefund, "gateway:bank", `{"gateway":"bank","transaction_id":%q,"refund":"%d","of":"990","currency":"EUR","reason":%q}`, r.TransactionID, r.Amount, reason)(s)
	}
}

func held(until time.Duration, reason string) func(*orders.Story) {
	return func(s *orders.Story) { s.Order.HoldUntil, s.Order.HoldReason = ptr(until), reason }
}

// forgotten is what retention leaves of a final order.
func forgotten(s *orders.Story) { s.Events, s.Outbox = nil, nil }

const (
	sec    = time.Second
	minute = time.Minute
	hour   = time.Hour
)

// cases are the states of an order, each with every reason for it that there is.
var cases = []struct {
	name  string
	story orders.Story
}{
	{"paid before the deadline", story(-hour, sent(-90*minute, -hour), paid(-hour-3*sec))},
	{"paid at the deadline", story(-hour, sent(-90*minute, -hour), paid(-hour))},
	{"paid before a deadline that lies ahead", story(20*minute, sent(-9*minute, 20*minute), paid(-5*minute))},
	{"paid after the deadline", story(-hour, sent(-90*minute, -hour), paid(-hour+200*time.Millisecond))},
	{"paid in time by the gateway, told too late", story(-hour, sent(-90*minute, -hour), paid(-hour+2*minute), func(s *orders.Story) { s.Payments[0].PaidAt = ptr(-hour - minute) })},
	{"paid twice, the second given back", story(-hour, sent(-90*minute, -hour), paid(-hour-3*sec), refund(-50*minute, orders.RefundDuplicate, "done", func(r *orders.RecordedRefund) { r.GatewayRefundID = "R-9" }),
		event(-49*minute, orders.EventRefunded, "gateway:bank", `{"gateway":"bank","transaction_id":"T-2","refund":"990","currency":"EUR","reason":"duplicate","gateway_refund_id":"R-9"}`))},
	{"paid too much, the excess waits", story(-hour, sent(-90*minute, -hour), paid(-hour-3*sec), refund(-hour-3*sec, orders.RefundExcess, "pending", func(r *orders.RecordedRefund) { r.TransactionID, r.Amount = "T-1", 10 }))},
	{"paid without a deadline", story(-hour, exempt, paid(-50*minute))},
	{"paid, and forgotten", story(-100*24*hour, paid(-100*24*hour-5*minute), forgotten)},

	{"cancelled by its message", story(-hour, sent(-90*minute, -hour), timedOut(-hour+120*time.Millisecond, 120*time.Millisecond))},
	{"cancelled by its message, late, after an extension", story(-hour, event(-70*minute, orders.EventExtended, "cli:ann", `{"from":%q,"to":%q}`, rfc(-65*minute), rfc(-hour)), sent(-70*minute, -hour), timedOut(-hour+75*sec, 75*sec))},
	{"cancelled by its message, then paid, to be given back", story(-hour, sent(-90*minute, -hour), timedOut(-hour+80*time.Millisecond, 80*time.Millisecond), refund(-hour+5*sec, orders.RefundLate, "pending"))},
	{"cancelled, paid late, the refund fails", story(-hour, sent(-90*minute, -hour), timedOut(-hour+80*time.Millisecond, 80*time.Millisecond),
		refund(-hour+5*sec, orders.RefundLate, "pending", func(r *orders.RecordedRefund) { r.Attempts, r.LastError, r.AvailableAt = 3, "gateway: 503", at(40*sec) }))},
	{"cancelled, paid late, the refund is given up", story(-hour, sent(-90*minute, -hour), timedOut(-hour+80*time.Millisecond, 80*time.Millisecond),
		refund(-hour+5*sec, orders.RefundLate, "given_up", func(r *orders.RecordedRefund) { r.Attempts, r.LastError = 12, "account closed" }),
		event(-20*minute, orders.EventRefundGivenUp, "gateway:bank", `{"gateway":"bank","transaction_id":"T-2","refund":"990","currency":"EUR","reason":"late","because":"account closed"}`),
		parked(orders.ParkedPayment, "bank:T-2", "990 EUR of order 17 (late) cannot be refunded: account closed", orders.StateParked))},
	{"cancelled, paid late, the refund given up and discarded", story(-hour, sent(-90*minute, -hour), timedOut(-hour+80*time.Millisecond, 80*time.Millisecond),
		refund(-hour+5*sec, orders.RefundLate, "given_up", func(r *orders.RecordedRefund) { r.Attempts, r.LastError = 12, "account closed" }),
		parked(orders.ParkedPayment, "bank:T-2", "990 EUR of order 17 (late) cannot be refunded: account closed", orders.StateDiscarded))},
	{"cancelled, paid late, the refund tried again by hand", story(-hour, sent(-90*minute, -hour), timedOut(-hour+80*time.Millisecond, 80*time.Millisecond),
		refund(-hour+5*sec, orders.RefundLate, "pending", func(r *orders.RecordedRefund) { r.LastError = "account closed" }), parked(orders.ParkedPayment, "bank:T-2", "990 EUR of order 17 (late) cannot be refunded: account closed", orders.StateRetried))},
	{"cancelled, paid four times", story(-hour, sent(-90*minute, -hour), timedOut(-hour+80*time.Millisecond, 80*time.Millisecond), refund(-9*minute, orders.RefundLate, "done"), refund(-8*minute, orders.RefundLate, "pending"), refund(-7*minute, orders.RefundLate, "pending"), refund(-6*minute, orders.RefundLate, "pending"))},
	{"cancelled, the gateway's page perhaps open", story(-hour, sent(-90*minute, -hour), timedOut(-hour+80*time.Millisecond, 80*time.Millisecond), func(s *orders.Story) {
		s.Tasks = []orders.PendingTask{{Kind: orders.TaskClose, Attempts: 2, CreatedAt: at(-hour), AvailableAt: at(30 * sec), LastError: "gateway: time-out"}}
	})},
	{"cancelled after a hold", story(-hour, sent(-50*minute, -50*minute), event(-hour, orders.EventHeld, "lapse", `{"reason":"the gateway says: in progress","until":%q}`, rfc(-50*minute)),
		event(-50*minute, orders.EventGateway, "lapse", `{"call":"close","answer":"closed","attempts":2}`), timedOut(-50*minute, 10*minute))},
	{"cancelled by hand before the deadline", story(10*minute, sent(-19*minute, 10*minute), byHand(-2*minute))},
	{"cancelled by hand after the deadline", story(-hour, byHand(-2*minute))},
	{"cancelled by hand without a deadline", story(-hour, exempt, byHand(-2*minute))},
	{"cancelled by hand, and forgotten", story(-100*24*hour, byHand(-99*24*hour), forgotten)},
	{"cancelled by reconcile: never sent", story(-12*hour, pending(-12*hour, failed), reconciled(-30*minute, orders.MissedNeverSent, "sending failed 7 times, the last time: connection refused"), timedOut(-30*minute, 11*hour+30*minute))},
	{"cancelled by reconcile: not received", story(-12*hour, sent(-12*hour, -12*hour), reconciled(-30*minute, orders.MissedNotReceived, "message 01AB was sent at 2026-11-30 03:00:00 UTC, and no consumer has handled it"), timedOut(-30*minute, 11*hour+30*minute))},
	{"cancelled by reconcile: parked", story(-12*hour, refused(orders.StateParked), reconciled(-30*minute, orders.MissedParked, "code 40012: message too large"), timedOut(-30*minute, 11*hour+30*minute))},
	{"cancelled by reconcile of a newer build", story(-12*hour, reconciled(-30*minute, "eaten", "a dog ate it"), timedOut(-30*minute, 11*hour+30*minute))},
	{"cancelled by timeout, and forgotten", story(-100*24*hour, timedOut(-100*24*hour+time.Second, time.Second), forgotten)},

	{"no deadline", story(-hour, exempt)},
	{"no deadline, and money that does not fit", story(-hour, exempt, refund(-30*minute, orders.RefundMismatch, "pending"))},
	{"waiting", story(12*minute+30*sec, sent(-17*minute, 12*minute+30*sec+50*time.Millisecond))},
	{"waiting after an extension", story(hour, event(-5*minute, orders.EventExtended, "api:shop", `{"from":%q,"to":%q}`, rfc(10*minute), rfc(hour)), sent(-5*minute, hour))},
	{"waiting for a hop", story(50*hour, sent(-hour, 22*hour+50*minute))},
	{"a hop that is being delivered", story(50*hour, sent(-hour, -2*sec))},
	{"a hop that does not come back", story(50*hour, sent(-24*hour, -10*minute))},
	{"just placed", story(30*minute-100*time.Millisecond, pending(-100*time.Millisecond))},
	{"taken by a relay", story(30*minute, pending(20*sec, leased))},
	{"not yet offered to the relay", story(30*sec, pending(15*sec, sentOnce), event(-time.Second, orders.EventRetimed, "lapse", `{"result":"not_due","deliver_at":%q}`, rfc(30*sec)))},
	{"no relay takes it", story(10*minute, pending(-20*minute))},
	{"sending fails", story(10*minute, pending(8*sec, failed))},
	{"sending fails, and is tried at this moment", story(10*minute, pending(28*sec, failed, leased))},
	{"refused by the broker", story(10*minute, refused(orders.StateParked), event(-20*minute, orders.EventParked, "lapse", `{"reason":"code 40012: message too large"}`))},
	{"refused by the broker, and discarded", story(10*minute, refused(orders.StateDiscarded))},
	{"the outbox row is gone", story(10 * minute)},

	{"due at this moment", story(-300*time.Millisecond, sent(-30*minute, -250*time.Millisecond))},
	{"sent late, and due at this moment", story(-hour, sent(-sec, -hour))},
	{"due, and its hold is just over", story(-hour, sent(-10*minute, -2*sec), held(-2*sec, "the gateway says: in progress"))},
	{"overdue, the message not received", story(-25*minute, sent(-55*minute, -25*minute))},
	{"overdue, no relay takes it", story(-25*minute, pending(-55*minute))},
	{"overdue, sending fails", story(-25*minute, pending(8*sec, failed))},
	{"overdue, and about to be sent after a retry", story(-25*minute, pending(-sec, sentOnce), parked(orders.ParkedOrder, "17", "cancelling it failed 3 times", orders.StateRetried), event(-10*minute, orders.EventRetried, "cli:ann", `{"parked":4,"reason":"cancelling it failed 3 times"}`))},
	{"overdue, the outbox row is gone", story(-25 * minute)},
	{"held", story(-5*minute, pending(2*minute), held(3*minute, "the gateway says: in progress"), event(-2*minute, orders.EventHeld, "lapse", `{"reason":"the gateway says: in progress","until":%q}`, rfc(3*minute)))},
	{"held without a reason", story(-5*minute, pending(2*minute), held(3*minute, ""))},
	{"parked", story(-25*minute, sent(-55*minute, -25*minute), parked(orders.ParkedOrder, "17", "cancelling it failed 3 times, in message 01AB: duplicate entry", orders.StateParked),
		event(-20*minute, orders.EventParked, "lapse", `{"reason":"cancelling it failed 3 times, in message 01AB: duplicate entry"}`))},
	{"parked, several times", story(-25*minute, sent(-55*minute, -25*minute), parked(orders.ParkedOrder, "17", "out of range", orders.StateParked), func(s *orders.Story) { s.Parked[0].Times, s.Parked[0].LastAt = 3, at(-minute) })},
	{"overdue, refused by the broker, its parked row gone", story(-25*minute, refused(orders.StateParked), func(s *orders.Story) { s.Parked = nil })},
	{"overdue, refused by the broker, and discarded", story(-25*minute, refused(orders.StateDiscarded))},
	{"its message is a dead letter", story(-25*minute, sent(-55*minute, -25*minute), parked(orders.ParkedMessage, "01AB", "dead letter of %DLQ%order-timeout-cg", orders.StateParked),
		event(-20*minute, orders.EventParked, "lapse", `{"reason":"dead letter of %%DLQ%%order-timeout-cg","message_id":"01AB"}`))},
	{"its dead letter is discarded", story(-25*minute, sent(-55*minute, -25*minute), parked(orders.ParkedMessage, "01AB", "dead letter of %DLQ%order-timeout-cg", orders.StateDiscarded))},
	{"a later message than the parked one is on its way", story(12*minute, sent(-5*minute, 12*minute), parked(orders.ParkedMessage, "00FF", "dead letter of %DLQ%order-timeout-cg", orders.StateParked))},

	{"a state of a newer build", story(-hour, func(s *orders.Story) { s.Order.Status = "shipped" }, event(-50*minute, "shipped_out", "newer", `{"by":"drone"}`), event(-40*minute, orders.EventStockMissing, "lapse", `{"sku":"tea","quantity":2,"move":"release"}`))},
	{"no such order", orders.Story{ID: 17, Now: now}},
	{"no such order, though a message named it", orders.Story{ID: 17, Now: now, ReadOnly: true, Parked: []orders.ParkedRow{{ID: 4, Parked: orders.Parked{What: orders.ParkedOrder, Ref: "17", Reason: "a timed message names this order, and there is none"}, Times: 2, FirstAt: at(-hour), LastAt: at(-minute), State: orders.StateParked}},
		Events: []orders.Event{happened(-hour, orders.EventParked, "lapse", `{"reason":"a timed message names this order, and there is none"}`)}}},
}

// The whole of every answer is held against a file that was read line by line.
func TestEveryStateOfAnOrderIsAnsweredWithItsReason(t *testing.T) {
	t.Parallel()
	var got strings.Builder
	seen := map[Cause]bool{}
	for _, tc := range cases {
		a := Tell(tc.story)
		seen[a.Cause] = true
		fmt.Fprintf(&got, "== %s\n%s: %s\n", tc.name, a.Cause, a.Answer)
		if a.Next != "" {
			fmt.Fprintf(&got, "   next: %s\n", a.Next)
		}
		for _, e := range a.Entries {
			ahead := " "
			if e.Ahead {
				ahead = ">"
			}
			fmt.Fprintf(&got, "%s  %s  %-10s %-12s %s\n", ahead, e.At.Format("01-02 15:04:05.000"), e.Kind, e.Actor, e.Text)
		}
		if strings.Count(a.Answer, ". ") > 0 || !strings.HasSuffix(a.Answer, ".") || strings.Contains(got.String(), "%!") {
			t.Errorf("%s: %q is not one sentence", tc.name, a.Answer)
		}
	}
	source, err := os.ReadFile("why.go")
	if err != nil {
		t.Fatal(err)
	}
	causes := regexp.MustCompile(`Cause = "([a-z_]+)"`).FindAllStringSubmatch(string(source), -1)
	for _, m := range causes {
		if !seen[Cause(m[1])] {
			t.Errorf("no story has the cause %s", m[1])
		}
	}
	if len(causes) != len(seen) || len(causes) < 15 {
		t.Errorf("%d causes are declared, %d are told", len(causes), len(seen))
	}
	const file = "testdata/answers.golden"
	if *update {
		if err := os.WriteFile(file, []byte(got.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	wantLines, gotLines := strings.Split(string(want), "\n"), strings.Split(got.String(), "\n")
	if len(wantLines) != len(gotLines) {
		t.Errorf("%d lines, want %d as in %s", len(gotLines), len(wantLines), file)
	}
	for i := range min(len(wantLines), len(gotLines)) {
		if gotLines[i] != wantLines[i] {
			t.Errorf("line %d\n%s\nwant\n%s", i+1, gotLines[i], wantLines[i])
		}
	}
}

// A kind that is told by its name alone is one of a newer build, or one that was forgotten here.
func TestEveryKindOfEventIsToldInWords(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("../../../orders/event.go")
	if err != nil {
		t.Fatal(err)
	}
	kinds := regexp.MustCompile(`Event[A-Za-z]+ += "([a-z_]+)"`).FindAllStringSubmatch(string(source), -1)
	if len(kinds) < 10 {
		t.Fatalf("%d kinds of events", len(kinds))
	}
	for _, m := range kinds {
		told := (&teller{}).told(happened(0, m[1], "lapse", `{"odd":1}`))
		if strings.Contains(told, "odd") {
			t.Errorf("an event of kind %s is told as %q", m[1], told)
		}
	}
	if told := (&teller{}).told(happened(0, "shipped_out", "newer", `{"odd":1}`)); told != `shipped out {"odd":1}` {
		t.Errorf("an unknown kind is told as %q", told)
	}
}

func TestDurationsAreWrittenAsPeopleSayThem(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-sec: "0 ms", 0: "0 ms", 999 * time.Millisecond: "999 ms", sec: "1 s", 3400 * time.Millisecond: "3 s", 59*sec + 999*time.Millisecond: "59 s",
		minute: "1 min", 90 * sec: "1 min 30 s", 12*minute + 59*sec: "12 min", hour - 1: "59 min", hour: "1 h", 2*hour + 5*minute: "2 h 5 min", 47*hour + 59*minute: "47 h 59 min",
		48 * hour: "2 days", 75*hour + 30*minute: "3 days 3 h",
	} {
		if got := words(d); got != want {
			t.Errorf("%s is %q, want %q", d, got, want)
		}
	}
}

func TestTheAnswerAsJSONHasIdsAndAmountsAsStringsAndInstantsInUTC(t *testing.T) {
	t.Parallel()
	s := story(12*minute, sent(-18*minute, 12*minute))
	s.Now = s.Now.In(time.FixedZone("", 8*3600))
	s.Events = nil
	raw, err := json.Marshal(Tell(s))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"order_id":"17","at":"2026-11-30T15:00:00.000Z","order":{"status":"unpaid","channel":"web","user_id":"u-1","currency":"EUR","amount":"990","deadline_at":"2026-11-30T15:12:00.000Z"},` +
		`"cause":"waiting","answer":"Not cancelled yet: the timed message is due in 12 min.","entries":[` +
		`{"at":"2026-11-30T14:42:00.000Z","kind":"placed","text":"placed (its event is gone)"},{"at":"2026-11-30T14:42:00.000Z","kind":"sent","actor":"relay","text":"timed message 01AB, due 2026-11-30 15:12:00 UTC"},` +
		`{"at":"2026-11-30T15:12:00.000Z","kind":"deadline","text":"the deadline, in 12 min","ahead":true},{"at":"2026-11-30T15:12:00.000Z","kind":"due","text":"the timed message is due, in 12 min","ahead":true}]}`
	if string(raw) != want {
		t.Errorf("\n%s\nwant\n%s", raw, want)
	}
}
