package trial

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

var noon = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// agreeing gives one order of each fate, and a database that agrees with what was told about it.
func agreeing() (map[int64]*Account, map[int64]Row) {
	accepted := orders.PaymentResult{Outcome: orders.PaymentAccepted}
	again := orders.PaymentResult{Outcome: orders.PaymentAccepted, Repeated: true}
	late := orders.PaymentResult{Outcome: orders.PaymentLate, Refund: 100, RefundReason: orders.RefundLate}
	excess := orders.PaymentResult{Outcome: orders.PaymentAccepted, Refund: 30, RefundReason: orders.RefundExcess}
	accounts := map[int64]*Account{
		1: {Kind: RepeatsNotice, Payments: map[string]*PaymentAccount{"1-1": {Amount: 100, Answers: []orders.PaymentResult{again, accepted, again}}}},
		2: {Kind: PaysLate, Payments: map[string]*PaymentAccount{"2-1": {Amount: 100, Answers: []orders.PaymentResult{late}}}},
		3: {Kind: CancelsByHand, Cancels: []orders.Result{orders.ResultCancelled}},
		4: {Kind: PaysTooMuch, Payments: map[string]*PaymentAccount{"4-1": {Amount: 130, Answers: []orders.PaymentResult{excess}}}},
		5: {Kind: NeverPays},
		6: {Kind: NeverPays, Refused: "out of stock"},
		7: {Kind: NeverPays}, // parked
		8: {Kind: CancelsByHand, Cancels: []orders.Result{orders.ResultAlreadyCancelled}},
	}
	for id, a := range accounts {
		a.ID, a.Amount, a.Deadline, a.Placed, a.Calls = id, 100, noon, a.Refused == "", 1
	}
	timeout := Row{Status: orders.Cancelled, Reason: orders.ReasonTimeout, CancelledAt: noon.Add(time.Second), Cancels: 1}
	hand := Row{Status: orders.Cancelled, Reason: handReason, CancelledAt: noon, Cancels: 1}
	with := func(r Row, p map[string]PaymentRow) Row { r.Payments = p; return r }
	rows := map[int64]Row{
		1: {Status: orders.Paid, Payments: map[string]PaymentRow{"1-1": {Amount: 100, Outcome: orders.PaymentAccepted}}},
		2: with(timeout, map[string]PaymentRow{"2-1": {Amount: 100, Outcome: orders.PaymentLate, Refund: 100, RefundReason: orders.RefundLate}}),
		3: hand,
		4: {Status: orders.Paid, Payments: map[string]PaymentRow{"4-1": {Amount: 130, Outcome: orders.PaymentAccepted, Refund: 30, RefundReason: orders.RefundExcess}}},
		5: timeout,
		7: {Status: orders.Unpaid, SetAside: true},
		8: timeout,
	}
	for id, r := range rows {
		r.ID, r.Amount, r.DeadlineAt = id, 100, noon
		rows[id] = r
	}
	return accounts, rows
}

func compare(accounts map[int64]*Account, rows map[int64]Row) []orders.Check {
	ledger := &Ledger{accounts: accounts}
	return Compare(ledger.Accounts(), rows)
}

func TestADatabaseThatAgreesHasNoViolation(t *testing.T) {
	t.Parallel()
	want := map[string]int64{"placed_is_there": 8, "accepted_is_paid": 7, "unpaid_is_cancelled": 5, "money_as_told": 5, "calls_are_answered": 8}
	checks := compare(agreeing())
	for _, c := range checks {
		if c.Violations != 0 || len(c.Examples) != 0 {
			t.Errorf("%s: %+v", c.Name, c.Examples)
		}
		if c.Rows != want[c.Name] || c.Invariant != "I7" {
			t.Errorf("%s looked at %d rows, want %d (%s)", c.Name, c.Rows, want[c.Name], c.Invariant)
		}
	}
	if len(checks) != len(want) {
		t.Errorf("%d checks, want %d", len(checks), len(want))
	}
}

func TestEachDisagreementIsFound(t *testing.T) {
	t.Parallel()
	type world struct {
		accounts map[int64]*Account
		rows     map[int64]Row
	}
	row := func(id int64, change func(*Row)) func(world) {
		return func(w world) {
			r := w.rows[id]
			change(&r)
			w.rows[id] = r
		}
	}
	payment := func(id int64, transaction string, change func(*PaymentRow)) func(world) {
		return func(w world) {
			p := w.rows[id].Payments[transaction]
			change(&p)
			w.rows[id].Payments[transaction] = p
		}
	}
	for _, test := range []struct {
		name  string
		plant func(world)
		check string
		order int64
		says  string
	}{
		{"a placed order is lost", func(w world) { delete(w.rows, 5) }, "placed_is_there", 5, "no such order"},
		{"a refused order is there", func(w world) { w.rows[6] = Row{ID: 6, Status: orders.Cancelled} }, "placed_is_there", 6, "refused"},
		{"nobody placed it", func(w world) { w.rows[9] = Row{ID: 9, Status: orders.Paid} }, "placed_is_there", 9, "nobody placed it"},
		{"the amount changed", row(5, func(r *Row) { r.Amount = 1 }), "placed_is_there", 5, "has 1"},
		{"accepted money on a cancelled order", row(1, func(r *Row) { r.Status, r.Reason, r.Cancels = orders.Cancelled, orders.ReasonTimeout, 1 }), "accepted_is_paid", 1, "told accepted"},
		{"paid by nobody", row(5, func(r *Row) { r.Status = orders.Paid }), "accepted_is_paid", 5, "no payment was told accepted"},
		{"told paid to the one who cancels", func(w world) { w.accounts[8].Cancels = []orders.Result{orders.ResultAlreadyPaid} }, "accepted_is_paid", 8, "told that it is paid"},
		{"still unpaid", row(5, func(r *Row) { r.Status = orders.Unpaid }), "unpaid_is_cancelled", 5, "still unpaid"},
		{"cancelled twice", row(5, func(r *Row) { r.Cancels = 2 }), "unpaid_is_cancelled", 5, "2 events"},
		{"cancelled without an event", row(5, func(r *Row) { r.Cancels = 0 }), "unpaid_is_cancelled", 5, "0 events"},
		{"the cancel by hand became a timeout", row(3, func(r *Row) { r.Reason = orders.ReasonTimeout }), "unpaid_is_cancelled", 3, "told cancelled by hand"},
		{"cancelled by hand by nobody", row(5, func(r *Row) { r.Reason = handReason }), "unpaid_is_cancelled", 5, "nobody was told so"},
		{"cancelled by hand, and paid", func(w world) { w.accounts[1].Cancels = []orders.Result{orders.ResultCancelled} }, "unpaid_is_cancelled", 1, "it is paid"},
		{"the extension was lost", func(w world) { w.accounts[5].Deadline = noon.Add(time.Minute) }, "unpaid_is_cancelled", 5, "told last is 2026-11-30T12:01:00Z"},
		{"the payment is lost", func(w world) { delete(w.rows[2].Payments, "2-1") }, "money_as_told", 2, "no such payment"},
		{"another outcome is stored", payment(2, "2-1", func(p *PaymentRow) { p.Outcome = orders.PaymentAccepted }), "money_as_told", 2, "accepted"},
		{"another amount is stored", payment(2, "2-1", func(p *PaymentRow) { p.Amount = 99 }), "money_as_told", 2, "it is 99"},
		{"the refund is lost", payment(2, "2-1", func(p *PaymentRow) { p.Refund, p.RefundReason = 0, "" }), "money_as_told", 2, "refund of 100"},
		{"the refund is too small", func(w world) {
			payment(2, "2-1", func(p *PaymentRow) { p.Refund = 50 })(w)
			w.accounts[2].Payments["2-1"].Answers[0].Refund = 50
		}, "money_as_told", 2, "50 of it goes back"},
		{"the excess stays", func(w world) {
			payment(4, "4-1", func(p *PaymentRow) { p.Refund, p.RefundReason = 0, "" })(w)
			w.accounts[4].Payments["4-1"].Answers[0] = orders.PaymentResult{Outcome: orders.PaymentAccepted}
		}, "money_as_told", 4, "accepted for an amount of 100"},
		{"the same notice was told two things", func(w world) { w.accounts[1].Payments["1-1"].Answers[2].Outcome = orders.PaymentDuplicate }, "money_as_told", 1, "and then duplicate"},
		{"the same notice was recorded twice", func(w world) { w.accounts[1].Payments["1-1"].Answers[2].Repeated = false }, "money_as_told", 1, "2 times"},
		{"a payment of nobody", func(w world) {
			row(5, func(r *Row) {
				r.Payments = map[string]PaymentRow{"5-9": {Amount: 100, Outcome: orders.PaymentLate, Refund: 100}}
			})(w)
		}, "money_as_told", 5, "nobody reported it"},
		{"a call without an answer", func(w world) { w.accounts[5].Failures = []string{"pay: connection refused"} }, "calls_are_answered", 5, "connection refused"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			accounts, rows := agreeing()
			test.plant(world{accounts, rows})
			for _, c := range compare(accounts, rows) {
				if c.Name != test.check {
					continue
				}
				if c.Violations != 1 || c.Examples[0].OrderID != test.order || !strings.Contains(c.Examples[0].Detail, test.says) {
					t.Fatalf("%s: %+v, want one violation of order %d that says %q", c.Name, c, test.order, test.says)
				}
				return
			}
			t.Fatalf("no check %s", test.check)
		})
	}
}

func TestManyViolationsAreCountedAndSomeListed(t *testing.T) {
	t.Parallel()
	rows := map[int64]Row{}
	for id := range int64(maxExamples + 50) {
		rows[id+1] = Row{ID: id + 1, Status: orders.Unpaid}
	}
	c := Compare(nil, rows)[0]
	if c.Violations != maxExamples+50 || len(c.Examples) != maxExamples || c.Examples[0].OrderID != 1 {
		t.Fatalf("%d violations, %d listed, the first of order %d", c.Violations, len(c.Examples), c.Examples[0].OrderID)
	}
}

func TestTwoAuditsBecomeOneList(t *testing.T) {
	t.Parallel()
	middle := []orders.Check{{Name: "a", Rows: 3, Violations: 1, Examples: []orders.Violation{{OrderID: 1}}}, {Name: "b", Rows: 2}}
	end := []orders.Check{{Name: "a", Rows: 5, Violations: 1, Examples: []orders.Violation{{OrderID: 2}}}, {Name: "b"}}
	want := []orders.Check{{Name: "a", Rows: 8, Violations: 2, Examples: []orders.Violation{{OrderID: 1}, {OrderID: 2}}}, {Name: "b", Rows: 2}}
	if got := fold(middle, end); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := fold(nil, end); !reflect.DeepEqual(got, end) {
		t.Errorf("%+v, want %+v", got, end)
	}
}
