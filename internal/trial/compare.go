package trial

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// maxExamples bounds the violations that one check lists; all are counted.
const maxExamples = 100

// verdict collects one check.
type verdict struct{ orders.Check }

func newVerdict(name, says string) *verdict {
	return &verdict{orders.Check{Invariant: "I7", Name: name, Says: says}}
}

func (v *verdict) broken(id int64, format string, args ...any) {
	if v.Violations++; v.Violations <= maxExamples {
		v.Examples = append(v.Examples, orders.Violation{OrderID: id, Detail: fmt.Sprintf(format, args...)})
	}
}

// Compare holds the database against what the shop was told (invariant I7: nothing is dropped in silence). All orders have to have had
// their time: one that is still unpaid, neither held nor parked, is a violation.
func Compare(accounts []Account, rows map[int64]Row) []orders.Check {
	there := newVerdict("placed_is_there", "every order that the checkout was told is placed is there as told, a refused one is not, and nobody else's is")
	paid := newVerdict("accepted_is_paid", "an order is paid if, and only if, the shop was told that its payment is accepted")
	cancelled := newVerdict("unpaid_is_cancelled", "every other order is cancelled once: by hand if the shop was told so, else by timeout, at the deadline that it was told")
	money := newVerdict("money_as_told", "every notice has its payment, with the outcome and the refund that the gateway was told, and there is no other")
	answered := newVerdict("calls_are_answered", "every call had an answer in the end")

	known := make(map[int64]bool, len(accounts))
	for _, a := range accounts {
		known[a.ID] = true
		row, found := rows[a.ID]
		there.Rows++
		answered.Rows += int64(a.Calls)
		for _, f := range a.Failures {
			answered.broken(a.ID, "%s", f)
		}
		switch {
		case a.Placed && !found:
			there.broken(a.ID, "told placed, and there is no such order")
		case a.Placed && row.Amount != a.Amount:
			there.broken(a.ID, "placed with amount %d, and it has %d", a.Amount, row.Amount)
		case a.Refused != "" && found:
			there.broken(a.ID, "refused (%s), and it is there, %s", a.Refused, row.Status)
		}
		if !a.Placed || !found {
			continue
		}
		comparePaid(paid, a, row)
		compareCancelled(cancelled, a, row)
		compareMoney(money, a, row)
	}
	for _, id := range slices.Sorted(maps.Keys(rows)) {
		if !known[id] {
			there.broken(id, "is there, %s, and nobody placed it", rows[id].Status)
		}
	}
	checks := make([]orders.Check, 0, 5)
	for _, v := range []*verdict{there, paid, cancelled, money, answered} {
		checks = append(checks, v.Check)
	}
	return checks
}

func comparePaid(v *verdict, a Account, row Row) {
	v.Rows++
	told := a.accepted()
	switch {
	case told && row.Status != orders.Paid:
		v.broken(a.ID, "a payment was told accepted, and the order is %s", describe(row))
	case !told && row.Status == orders.Paid:
		v.broken(a.ID, "paid, and no payment was told accepted")
	case slices.Contains(a.Cancels, orders.ResultAlreadyPaid) && row.Status != orders.Paid:
		v.broken(a.ID, "a cancel by hand was told that it is paid, and it is %s", describe(row))
	}
}

func compareCancelled(v *verdict, a Account, row Row) {
	if row.Status == orders.Paid {
		if a.cancelledByHand() {
			v.broken(a.ID, "told cancelled by hand, and it is paid")
		}
		return
	}
	v.Rows++
	switch {
	case row.Status != orders.Cancelled:
		if !row.SetAside {
			v.broken(a.ID, "still %s, deadline %s, neither held nor parked", row.Status, row.DeadlineAt.Format(time.RFC3339Nano))
		}
	case row.Cancels != 1:
		v.broken(a.ID, "%s, with %d events that say so", describe(row), row.Cancels)
	case a.cancelledByHand() && row.Reason != handReason:
		v.broken(a.ID, "told cancelled by hand, and it is %s", describe(row))
	case len(a.Cancels) == 0 && !row.byTimeout():
		v.broken(a.ID, "%s, and nobody was told so", describe(row))
	case row.byTimeout() && !row.DeadlineAt.Equal(a.Deadline):
		v.broken(a.ID, "%s, and the deadline told last is %s", describe(row), a.Deadline.Format(time.RFC3339Nano))
	}
}

func compareMoney(v *verdict, a Account, row Row) {
	for _, transaction := range slices.Sorted(maps.Keys(a.Payments)) {
		told := a.Payments[transaction]
		v.Rows += int64(len(told.Answers))
		first := told.Answers[0]
		recorded := 0
		for _, answer := range told.Answers {
			if !answer.Repeated {
				recorded++
			}
			if answer.Outcome != first.Outcome || answer.Refund != first.Refund || answer.RefundReason != first.RefundReason {
				v.broken(a.ID, "payment %s was told %s with a refund of %d, and then %s with %d", transaction, first.Outcome, first.Refund, answer.Outcome, answer.Refund)
			}
		}
		if recorded > 1 {
			v.broken(a.ID, "payment %s was told %d times that it is recorded for the first time", transaction, recorded)
		}
		is, found := row.Payments[transaction]
		switch {
		case !found:
			v.broken(a.ID, "payment %s of %d was told %s, and there is no such payment", transaction, told.Amount, first.Outcome)
		case is.Amount != told.Amount || is.Outcome != first.Outcome:
			v.broken(a.ID, "payment %s of %d was told %s, and it is %d, %s", transaction, told.Amount, first.Outcome, is.Amount, is.Outcome)
		case is.Refund != first.Refund || is.RefundReason != first.RefundReason:
			v.broken(a.ID, "payment %s was told a refund of %d %s, and it is %d %s", transaction, first.Refund, first.RefundReason, is.Refund, is.RefundReason)
		case first.Outcome != orders.PaymentAccepted && is.Refund != told.Amount:
			v.broken(a.ID, "payment %s of %d was told %s, and %d of it goes back", transaction, told.Amount, first.Outcome, is.Refund)
		case first.Outcome == orders.PaymentAccepted && told.Amount-is.Refund != a.Amount:
			v.broken(a.ID, "payment %s of %d was accepted for an amount of %d, and %d of it goes back", transaction, told.Amount, a.Amount, is.Refund)
		}
	}
	for _, transaction := range slices.Sorted(maps.Keys(row.Payments)) {
		if a.Payments[transaction] == nil && len(a.Failures) == 0 {
			v.broken(a.ID, "payment %s is there, and nobody reported it", transaction)
		}
	}
}

func describe(row Row) string {
	if row.Status == orders.Cancelled {
		return fmt.Sprintf("cancelled (%s)", row.Reason)
	}
	return string(row.Status)
}
