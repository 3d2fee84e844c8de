// Package why answers the question why an order is as it is: it makes, of the story that the database has of an order, a list of what
// happened in time, and one sentence that answers.
//
// It is a function of the story alone, so that every state of an order can be laid before it in a table; what the story is read from does
// not matter. The package is apart from the rest of internal/ops, which asks the broker, so that the API, which never does, can import it.
package why

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// Cause is the answer in one word, for programs. More may come.
type Cause string

const (
	// PaidInTime says that the order was paid before its deadline, or at it.
	PaidInTime Cause = "paid_in_time"
	// PaidAfterDeadline says that the payment was recorded after the deadline and before anything cancelled the order.
	PaidAfterDeadline Cause = "paid_after_deadline"
	// PaidWithoutDeadline says that the order is paid and had no deadline.
	PaidWithoutDeadline Cause = "paid_without_deadline"

	// CancelledByMessage says that the order was unpaid when its timed message came.
	CancelledByMessage Cause = "cancelled_by_message"
	// CancelledByReconcile says that reconcile cancelled the order; the sentence says why no message did.
	CancelledByReconcile Cause = "cancelled_by_reconcile"
	// CancelledByTimeout says that the order was cancelled at its deadline, and that the events are gone which told by what.
	CancelledByTimeout Cause = "cancelled_by_timeout"
	// CancelledByHand says that somebody cancelled the order.
	CancelledByHand Cause = "cancelled_by_hand"

	// NoDeadline says that no timeout cancels the order.
	NoDeadline Cause = "no_deadline"
	// Waiting says that all is well: the deadline lies ahead and the timed message is sent.
	Waiting Cause = "waiting"
	// NotSentYet says that the deadline lies ahead and the timed message is about to be sent.
	NotSentYet Cause = "not_sent_yet"
	// SendFailing says that the timed message is not sent because sending it fails.
	SendFailing Cause = "send_failing"
	// NoRelay says that the timed message is not sent and nobody has tried: no relay runs, or it is behind.
	NoRelay Cause = "no_relay"
	// OutboxMissing says that the row is gone that makes the relay send the timed message.
	OutboxMissing Cause = "outbox_missing"
	// Due says that the deadline has just passed and the message is on its way.
	Due Cause = "due"
	// NotReceived says that the order is overdue and nothing shows that its timed message, which was sent, was received.
	NotReceived Cause = "not_received"
	// Held says that the cancel is put off, with a reason.
	Held Cause = "held"
	// Parked says that the order, or the message with it, was set aside, with a reason, and nobody has looked yet.
	Parked Cause = "parked"
	// Discarded says that the order is overdue after what was parked of it was discarded.
	Discarded Cause = "discarded"

	// UnknownState says that the order is in a state that this build does not know.
	UnknownState Cause = "unknown_state"
	// NotFound says that there is no such order.
	NotFound Cause = "not_found"
)

// Answer is what is to be said of one order.
type Answer struct {
	OrderID int64 `json:"order_id,string"`
	// At is the instant of all this by the database's clock.
	At Instant `json:"at"`
	// ReadOnly says that it was read from a server that takes no writes, a replica, which may be behind.
	ReadOnly bool `json:"read_only,omitempty"`
	// Order is what the order is; nil where there is none.
	Order *Order `json:"order,omitempty"`
	Cause Cause  `json:"cause"`
	// Answer is the sentence.
	Answer string `json:"answer"`
	// Next is what somebody should do; empty where nothing is to be done.
	Next string `json:"next,omitempty"`
	// Entries are what happened and what is to come, in time.
	Entries []Entry `json:"entries"`
}

// Order is what the order is.
type Order struct {
	Status     orders.Status `json:"status"`
	Channel    string        `json:"channel"`
	UserID     string        `json:"user_id"`
	Currency   string        `json:"currency"`
	Amount     int64         `json:"amount,string"` // minor units
	DeadlineAt *Instant      `json:"deadline_at"`
}

// Entry is one thing in the order's life.
type Entry struct {
	At Instant `json:"at"`
	// Kind is that of an event (placed, paid, cancelled, …), or deadline, outbox, unsent, sent, due, received, payment, hold, task.
	Kind string `json:"kind"`
	// Actor is who did it, where that is known.
	Actor string `json:"actor,omitempty"`
	// Text says it in words. What came from outside is in it as it came: escape it for terminals.
	Text string `json:"text"`
	// Ahead says that it lies in the future.
	Ahead bool `json:"ahead,omitempty"`
}

// Instant is written in UTC with milliseconds, which is what is stored.
type Instant struct{ time.Time }

// MarshalJSON implements json.Marshaler.
func (i Instant) MarshalJSON() ([]byte, error) {
	return []byte(i.UTC().Format(`"2006-01-02T15:04:05.000Z"`)), nil
}

func instantOf(t *time.Time) *Instant {
	if t == nil {
		return nil
	}
	return &Instant{*t}
}

const (
	// soon is for how long after its time something is on its way rather than missing: relay and consumer need well below a second, and a
	// consumer that was killed is made good for within minutes, which is worth a word.
	soon = 10 * time.Second
	// hop is by how much a message is due before the deadline, at least, that was sent for an instant on the way there.
	hop = time.Second
	// maxMoney is how many refunds the sentence speaks of; the entries have all.
	maxMoney = 2
)

// What to do next, for several causes.
const (
	nextReconcile = "reconcile cancels it with its next run, or now: lapse reconcile --once"
	nextDoctor    = "find out what is missing: lapse doctor; "
)

// Tell answers for a story.
func Tell(s orders.Story) Answer {
	t := &teller{Story: s}
	a := Answer{OrderID: s.ID, At: Instant{s.Now}, ReadOnly: s.ReadOnly}
	if o := s.Order; o != nil {
		a.Order = &Order{Status: o.Status, Channel: o.Channel, UserID: o.UserID, Currency: o.Currency, Amount: o.Amount, DeadlineAt: instantOf(o.DeadlineAt)}
	}
	var v verdict
	switch {
	case s.Order == nil:
		v = t.missing()
	case s.Order.Status == orders.Paid:
		v = t.paid()
	case s.Order.Status == orders.Cancelled:
		v = t.cancelled()
	case s.Order.Status != orders.Unpaid:
		v = verdict{UnknownState, fmt.Sprintf("It is in state \"%s\", which this build does not know", s.Order.Status), "ask the lapse that wrote it"}
	default:
		v = t.unpaid()
	}
	money, next := t.money()
	money = t.closing() + money
	a.Cause, a.Next = v.cause, v.next
	if a.Next == "" {
		a.Next = next
	}
	a.Answer = v.says + t.extended() + money + "."
	a.Entries = t.entries()
	return a
}

// verdict is the answer without what is said of every order.
type verdict struct {
	cause Cause
	says  string // a sentence without its full stop
	next  string
}

// teller has what several parts of the answer ask of a story.
type teller struct{ orders.Story }

// last gives the newest event of a kind.
func (t *teller) last(kind string) (orders.Event, bool) {
	for i := len(t.Events) - 1; i >= 0; i-- {
		if t.Events[i].Kind == kind {
			return t.Events[i], true
		}
	}
	return orders.Event{}, false
}

// parked gives the newest of what is parked of a sort, in a state.
func (t *teller) parked(what, state string) (row orders.ParkedRow, found bool) {
	for _, p := range t.Parked {
		if p.What == what && p.State == state && (!found || p.LastAt.After(row.LastAt)) {
			row, found = p, true
		}
	}
	return row, found
}

func (t *teller) missing() verdict {
	v := verdict{NotFound, fmt.Sprintf("There is no order %d", t.ID), ""}
	if p, is := t.parked(orders.ParkedOrder, orders.StateParked); is {
		v.says += fmt.Sprintf("; something named it, and it is parked since %s: %s", when(p.FirstAt), p.Reason)
		v.next = fmt.Sprintf("look at it (lapse parked show %d), and discard it with what you found", p.ID)
	} else {
		v.says += ": it was never placed, or retention has purged it"
	}
	if t.ReadOnly {
		v.says += "; this is said by a replica, which may be behind"
	}
	return v
}

func (t *teller) paid() verdict {
	by := ""
	for _, p := range t.Payments {
		if p.Outcome != orders.PaymentAccepted {
			continue
		}
		by = fmt.Sprintf(" (transaction %s of %s)", p.TransactionID, p.Gateway)
		if d := t.Order.DeadlineAt; d != nil && p.PaidAt != nil && t.Order.PaidAt != nil && t.Order.PaidAt.After(*d) && !p.PaidAt.After(*d) {
			by = fmt.Sprintf(" (transaction %s of %s, which says that it was paid on %s)", p.TransactionID, p.Gateway, when(*p.PaidAt))
		}
	}
	paidAt, deadline := t.Order.PaidAt, t.Order.DeadlineAt
	switch {
	case deadline == nil:
		return verdict{PaidWithoutDeadline, "Not cancelled: paid" + on(paidAt) + by + ", and it had no deadline", ""}
	case paidAt == nil:
		return verdict{PaidInTime, "Not cancelled: paid, at a time that is not stored" + by, ""}
	case paidAt.After(*deadline):
		return verdict{PaidAfterDeadline, fmt.Sprintf("Not cancelled: paid %s after the deadline, before anything cancelled it%s", words(paidAt.Sub(*deadline)), by), ""}
	case paidAt.Equal(*deadline):
		return verdict{PaidInTime, "Not cancelled: paid at the very deadline" + by, ""}
	}
	return verdict{PaidInTime, fmt.Sprintf("Not cancelled: paid %s before the deadline%s", words(deadline.Sub(*paidAt)), by), ""}
}

func (t *teller) cancelled() verdict {
	o := t.Order
	e, told := t.last(orders.EventCancelled)
	distance := ""
	if late, is := o.Lateness(); is && late >= 0 {
		distance = fmt.Sprintf(", %s after the deadline", words(late))
	} else if is {
		distance = fmt.Sprintf(", %s before the deadline", words(-late))
	}
	if o.CancelReason != orders.ReasonTimeout {
		who := ""
		if told {
			who = " by " + e.Actor
		}
		return verdict{CancelledByHand, fmt.Sprintf("Cancelled by hand%s%s%s: \"%s\"", on(o.CancelledAt), who, distance, o.CancelReason), ""}
	}
	if r, is := t.last(orders.EventReconciled); is {
		missed := r.Text("because")
		switch orders.Missed(r.Text("missed")) {
		case orders.MissedNeverSent:
			missed = "the timed message was never sent, because " + missed
		case orders.MissedNotReceived: // it says which message that was, and when it was sent
		case orders.MissedParked:
			missed = "it was parked, because " + missed
		}
		return verdict{CancelledByReconcile, fmt.Sprintf("Cancelled by reconcile%s%s: %s", on(o.CancelledAt), distance, missed), ""}
	}
	if !told {
		return verdict{CancelledByTimeout, fmt.Sprintf("Cancelled by timeout%s%s; the events are gone that told what did it", on(o.CancelledAt), distance), ""}
	}
	return verdict{CancelledByMessage, fmt.Sprintf("Cancelled by timeout%s%s: it was still unpaid when its timed message came", on(o.CancelledAt), distance), ""}
}

func (t *teller) unpaid() verdict {
	deadline := t.Order.DeadlineAt
	if deadline == nil {
		return verdict{NoDeadline, "Not cancelled: it has no deadline, so no timeout cancels it", ""}
	}
	if t.Now.Before(*deadline) {
		return t.ahead(deadline.Sub(t.Now))
	}
	return t.overdue(t.Now.Sub(*deadline))
}

// ahead answers for an unpaid order whose deadline comes in left.
func (t *teller) ahead(left time.Duration) verdict {
	says := func(format string, args ...any) string {
		return fmt.Sprintf("Not cancelled yet: the deadline is in %s, and %s", words(left), fmt.Sprintf(format, args...))
	}
	out := t.Outbox
	switch {
	case out == nil:
		return verdict{OutboxMissing, says("its outbox row is missing, so no timed message will come"), nextMissing + "once it is overdue, reconcile cancels it"}
	case out.State == "parked":
		next := "once it is overdue, reconcile cancels it"
		if p, is := t.parked(orders.ParkedOrder, orders.StateParked); is {
			next = fmt.Sprintf("mend what the reason says, then: lapse parked retry %d; otherwise %s", p.ID, next)
		}
		return verdict{Parked, says("its timed message cannot be sent, because %s", out.LastError), next}
	case out.State == "pending":
		v := t.unsent()
		if v.next != "" {
			v.next += "once it is overdue, reconcile cancels it"
		}
		return verdict{v.cause, says("%s", v.says), v.next}
	case deadlineIsHop(out.DeliverAt, *t.Order.DeadlineAt) && t.Now.Before(out.DeliverAt):
		return verdict{Waiting, says("a timed message on the way there is due in %s", words(out.DeliverAt.Sub(t.Now))), ""}
	case t.Now.Sub(later(out.DeliverAt, out.SentAt)) > soon:
		return verdict{NotReceived, says("%s", t.notReceived()), nextDoctor + "once it is overdue, reconcile cancels it"}
	case deadlineIsHop(out.DeliverAt, *t.Order.DeadlineAt):
		return verdict{Waiting, says("a timed message on the way there is being delivered"), ""}
	}
	return verdict{Waiting, fmt.Sprintf("Not cancelled yet: the timed message is due in %s", words(max(out.DeliverAt.Sub(t.Now), left))), ""}
}

const nextMissing = "somebody deletes rows of the table outbox: find out who; "

// deadlineIsHop says that a message due at deliver was sent for an instant on the way to the deadline.
func deadlineIsHop(deliver, deadline time.Time) bool { return deadline.Sub(deliver) > hop }

func later(a time.Time, b *time.Time) time.Time {
	if b != nil && b.After(a) {
		return *b
	}
	return a
}

// overdue answers for an unpaid order whose deadline was late ago.
func (t *teller) overdue(late time.Duration) verdict {
	says := func(format string, args ...any) string {
		return fmt.Sprintf("Not cancelled yet, %s after the deadline: %s", words(late), fmt.Sprintf(format, args...))
	}
	out, o := t.Outbox, t.Order
	if o.HoldUntil != nil && t.Now.Before(*o.HoldUntil) {
		because := ""
		if o.HoldReason != "" {
			because = ", because " + o.HoldReason
		}
		return verdict{Held, says("held for another %s, until %s%s", words(o.HoldUntil.Sub(t.Now)), when(*o.HoldUntil), because), ""}
	}
	if p, is := t.parked(orders.ParkedOrder, orders.StateParked); is {
		return verdict{Parked, says("parked%s, because %s", since(p), p.Reason), fmt.Sprintf("mend what the reason says, then: lapse parked retry %d; otherwise %s", p.ID, nextReconcile)}
	}
	if p, is := t.parked(orders.ParkedMessage, orders.StateParked); is && (out == nil || out.State != "pending" && out.MessageID == p.Ref) {
		return verdict{Parked, says("the timed message %s with it is parked%s, because %s", p.Ref, since(p), p.Reason), fmt.Sprintf("mend what the reason says, then: lapse parked retry %d; otherwise %s", p.ID, nextReconcile)}
	}
	switch {
	case out == nil:
		return verdict{OutboxMissing, says("its outbox row is missing, so no timed message comes"), nextMissing + nextReconcile}
	case out.State == "parked":
		if p, is := t.parked(orders.ParkedOrder, orders.StateDiscarded); is {
			return verdict{Discarded, says("its timed message cannot be sent, because %s, and %s discarded it%s: \"%s\"", out.LastError, p.HandledBy, on(p.HandledAt), p.HandledReason), nextReconcile}
		}
		return verdict{Parked, says("its timed message cannot be sent, because %s", out.LastError), nextReconcile}
	case out.State == "pending":
		v := t.unsent()
		if v.next != "" {
			v.next += nextReconcile
		}
		return verdict{v.cause, says("%s", v.says), v.next}
	}
	// From when on the message should have been there: a row may be sent late, and a hold puts the cancel off.
	expected := later(later(out.DeliverAt, out.SentAt), o.DeadlineAt)
	expected = later(expected, o.HoldUntil)
	if t.Now.Sub(expected) <= soon {
		return verdict{Due, says("its timed message is on its way"), ""}
	}
	if p, is := t.parked(orders.ParkedMessage, orders.StateDiscarded); is && out.MessageID == p.Ref {
		return verdict{Discarded, says("the timed message %s with it was parked, because %s, and %s discarded it%s: \"%s\"", p.Ref, p.Reason, p.HandledBy, on(p.HandledAt), p.HandledReason), nextReconcile}
	}
	return verdict{NotReceived, says("%s", t.notReceived()), nextDoctor + nextReconcile}
}

func (t *teller) notReceived() string {
	return fmt.Sprintf("its timed message %s was sent%s for %s, and nothing shows that a consumer received it: none runs, all are behind, or the broker has lost it",
		t.Outbox.MessageID, on(t.Outbox.SentAt), when(t.Outbox.DeliverAt))
}

// unsent says why an outbox row is still pending.
func (t *teller) unsent() verdict {
	out := t.Outbox
	what := "its timed message is not sent yet"
	if out.MessageID != "" {
		what = "another timed message is to be sent"
	}
	wait := t.Now.Sub(out.AvailableAt)
	switch {
	case out.Attempts > 0 && out.LastError != "":
		says := fmt.Sprintf("%s; since %s %s failed, the last because %s", what, when(t.outboxSince()), times(out.Attempts, "attempt"), out.LastError)
		if out.Leased {
			says += "; a relay is trying it at this moment"
		} else if wait < 0 {
			says += "; the next is in " + words(-wait)
		}
		return verdict{SendFailing, says, "mend what the reason says; the relay goes on trying by itself; "}
	case out.Leased && wait < 0:
		return verdict{NotSentYet, what + "; a relay has it in hand", ""}
	case wait < 0:
		return verdict{NotSentYet, fmt.Sprintf("%s; the relay takes it in %s", what, words(-wait)), ""}
	case wait <= soon:
		return verdict{NotSentYet, what + "; it waits for the relay's next look", ""}
	}
	return verdict{NoRelay, fmt.Sprintf("%s; it has been waiting for a relay for %s, and none has tried: none runs, or all are behind", what, words(wait)), nextDoctor}
}

// outboxSince is from when on the outbox row has been waiting to be sent: the newest event that made it pending.
func (t *teller) outboxSince() time.Time {
	for i := len(t.Events) - 1; i >= 0; i-- {
		switch e := t.Events[i]; e.Kind {
		case orders.EventPlaced, orders.EventExtended, orders.EventRetimed, orders.EventRetried:
			return e.At
		}
	}
	return t.Order.CreatedAt
}

// extended says who moved the deadline, for whoever asks why the order is not cancelled when it was first promised.
func (t *teller) extended() string {
	e, is := t.last(orders.EventExtended)
	if !is || t.Order == nil || t.Order.DeadlineAt == nil {
		return ""
	}
	from, err := time.Parse(time.RFC3339Nano, e.Text("from"))
	if err != nil {
		return fmt.Sprintf("; %s moved the deadline on %s", e.Actor, when(e.At))
	}
	return fmt.Sprintf("; %s moved the deadline on %s, from %s to %s", e.Actor, when(e.At), when(from), when(*t.Order.DeadlineAt))
}

// closing says that the gateway may still take money for the order.
func (t *teller) closing() string {
	var b strings.Builder
	for _, task := range t.Tasks {
		what := "the gateway still has to be told: " + task.Kind
		if task.Kind == orders.TaskClose {
			what = "the gateway has not confirmed yet that its payment page is closed"
		}
		fmt.Fprintf(&b, "; %s", what)
		if task.LastError != "" {
			fmt.Fprintf(&b, " (%s)", failures(task.Attempts, task.LastError))
		}
	}
	return b.String()
}

// money says what becomes of money that cannot stay.
func (t *teller) money() (says, next string) {
	var b strings.Builder
	for i, r := range t.Refunds {
		decided := ""
		if r.State == "given_up" {
			hint := "set the refund right with the gateway: lapse parked list --what payment"
			for _, p := range t.Parked {
				switch {
				case p.What != orders.ParkedPayment || p.Ref != r.Gateway+":"+r.TransactionID:
				case p.State == orders.StateParked:
					hint = fmt.Sprintf("mend what the reason says, then: lapse parked retry %d", p.ID)
				case p.State == orders.StateDiscarded:
					hint, decided = "", fmt.Sprintf("; %s decided: \"%s\"", p.HandledBy, p.HandledReason)
				}
			}
			next = cmp.Or(next, hint)
		}
		if i == maxMoney {
			fmt.Fprintf(&b, "; %d more refunds are in the list", len(t.Refunds)-maxMoney)
		}
		if i < maxMoney {
			fmt.Fprintf(&b, "; %s %s (transaction %s of %s) %s", money(r.Amount, r.Currency), whyBack(r.Reason), r.TransactionID, r.Gateway, refundState(r, t.Now)+decided)
		}
	}
	return b.String(), next
}

func whyBack(reason string) string {
	switch reason {
	case orders.RefundLate:
		return "paid after the cancel"
	case orders.RefundDuplicate:
		return "paid once more"
	case orders.RefundMismatch:
		return "that do not fit the order"
	case orders.RefundExcess:
		return "paid too much"
	}
	return "to be given back for " + reason
}

func refundState(r orders.RecordedRefund, now time.Time) string {
	failed := ""
	if r.LastError != "" {
		failed = failures(r.Attempts, r.LastError)
	}
	switch {
	case r.State == "done" && r.GatewayRefundID != "":
		return "were given back (refund " + r.GatewayRefundID + ")"
	case r.State == "done":
		return "were given back"
	case r.State == "given_up" && failed != "":
		return "were not given back: given up, " + failed
	case r.State == "given_up":
		return "were not given back: given up"
	case failed != "" && r.AvailableAt.After(now):
		return fmt.Sprintf("are still to be given back: %s; the next is in %s", failed, words(r.AvailableAt.Sub(now)))
	case failed != "":
		return "are still to be given back: " + failed
	}
	return "are to be given back"
}

// failures says how often something failed. A retry by hand begins to count anew, and the last error stays.
func failures(attempts int, last string) string {
	if attempts == 0 {
		return "earlier attempts failed, the last because " + last
	}
	return fmt.Sprintf("%s failed, the last because %s", times(attempts, "attempt"), last)
}

func since(p orders.ParkedRow) string {
	if p.Times > 1 {
		return fmt.Sprintf(" since %s, %d times", when(p.FirstAt), p.Times)
	}
	return " since " + when(p.FirstAt)
}
