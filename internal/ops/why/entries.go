package why

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// entries are the events, and beside them what only the rows tell.
func (t *teller) entries() []Entry {
	list := []Entry{}
	add := func(at time.Time, kind, actor, format string, args ...any) {
		list = append(list, Entry{At: Instant{at}, Kind: kind, Actor: actor, Text: fmt.Sprintf(format, args...), Ahead: at.After(t.Now)})
	}
	t.addPayments(add) // before the events: a payment comes before what it makes of the order
	for _, e := range t.Events {
		add(e.At, e.Kind, e.Actor, "%s", t.told(e))
	}
	if t.Order != nil {
		t.addOrder(add)
	}
	t.addOwed(add)
	t.addParked(add)
	slices.SortStableFunc(list, func(a, b Entry) int { return a.At.Compare(b.At.Time) })
	return list
}

// adder takes one entry.
type adder func(at time.Time, kind, actor, format string, args ...any)

// gone stands beside what is told from a row because its event is not there.
const gone = " (its event is gone)"

func (t *teller) addOrder(add adder) {
	o := t.Order
	if _, is := t.last(orders.EventPlaced); !is {
		add(o.CreatedAt, orders.EventPlaced, "", "placed%s", gone)
	}
	if d := o.DeadlineAt; d != nil {
		text := "the deadline"
		if d.After(t.Now) {
			text += ", in " + words(d.Sub(t.Now))
		}
		add(*d, "deadline", "", "%s", text)
	}
	if _, is := t.last(orders.EventPaid); !is && o.PaidAt != nil {
		add(*o.PaidAt, orders.EventPaid, "", "paid%s", gone)
	}
	if _, is := t.last(orders.EventCancelled); !is && o.CancelledAt != nil {
		add(*o.CancelledAt, orders.EventCancelled, "", "cancelled: %s%s", o.CancelReason, gone)
	}
	if h := o.HoldUntil; h != nil && o.Status == orders.Unpaid {
		text := "the hold ends"
		if o.HoldReason != "" {
			text += "; it began because " + o.HoldReason
		}
		add(*h, "hold", "", "%s", text)
	}
	t.addOutbox(add)
}

// addOutbox tells what is known of the timed message. That a consumer received it leaves no trace but what it did then.
func (t *teller) addOutbox(add adder) {
	out, final := t.Outbox, t.Order.Status == orders.Paid || t.Order.Status == orders.Cancelled
	if out == nil {
		if t.Order.DeadlineAt != nil {
			text := "no outbox row: no timed message will be sent"
			if final {
				text = "no outbox row: it was purged after the order had ended"
			}
			add(t.Now, "outbox", "", "%s", text)
		}
		return
	}
	if out.SentAt != nil {
		add(*out.SentAt, "sent", "relay", "timed message %s, due %s", out.MessageID, when(out.DeliverAt))
	}
	switch out.State {
	case "sent":
		text := "the timed message is due"
		if out.DeliverAt.After(t.Now) {
			text += ", in " + words(out.DeliverAt.Sub(t.Now))
			if final {
				text += "; it will find nothing to do"
			}
		}
		add(out.DeliverAt, "due", "", "%s", text)
		expected := later(out.DeliverAt, out.SentAt)
		if !final && t.Now.Sub(expected) > soon && !t.handledAfter(expected) {
			add(t.Now, "received", "", "nothing shows that the timed message was received: a consumer leaves a trace only by what it does with it")
		}
	case "pending":
		if !final {
			v := t.unsent()
			at := out.AvailableAt
			if out.Leased || at.Before(t.Now) {
				at = t.Now
			}
			add(at, "unsent", "", "%s", v.says)
		}
	case "parked":
		if !final {
			add(t.Now, "unsent", "", "the timed message cannot be sent: %s", out.LastError)
		}
	}
}

// handledAfter says that something after an instant shows that a consumer had received the message.
func (t *teller) handledAfter(at time.Time) bool {
	for _, e := range t.Events {
		if e.At.Before(at) {
			continue
		}
		switch e.Kind {
		case orders.EventCancelled, orders.EventRetimed, orders.EventHeld, orders.EventParked:
			return true
		}
	}
	return slices.ContainsFunc(t.Parked, func(p orders.ParkedRow) bool { return p.What != orders.ParkedPayment && !p.LastAt.Before(at) })
}

// told says an event in words. Kinds that this build does not know are told as they are: a newer part wrote them.
func (t *teller) told(e orders.Event) string {
	switch e.Kind {
	case orders.EventPlaced:
		if d := instantText(e.Text("deadline_at")); d != "" {
			return fmt.Sprintf("placed over %s %s, deadline %s", e.Text("amount"), e.Text("currency"), d)
		}
		return fmt.Sprintf("placed over %s %s, no deadline", e.Text("amount"), e.Text("currency"))
	case orders.EventPaid:
		text := fmt.Sprintf("paid %s %s, transaction %s of %s", e.Text("amount"), e.Text("currency"), e.Text("transaction_id"), e.Text("gateway"))
		for _, p := range t.Payments {
			if p.Gateway == e.Text("gateway") && p.TransactionID == e.Text("transaction_id") {
				text += saysPaid(p)
			}
		}
		return text
	case orders.EventCancelled:
		if reason := e.Text("reason"); reason != orders.ReasonTimeout {
			return fmt.Sprintf("cancelled by hand: \"%s\"; the stock is released", reason)
		}
		by := "its timed message, which had come by then"
		if _, is := t.last(orders.EventReconciled); is {
			by = "reconcile"
		}
		late, err := strconv.ParseInt(e.Text("lateness_ms"), 10, 64)
		if err != nil {
			return fmt.Sprintf("cancelled by %s; the stock is released", by)
		}
		return fmt.Sprintf("cancelled by %s, %s after the deadline; the stock is released", by, words(time.Duration(late)*time.Millisecond))
	case orders.EventExtended:
		return fmt.Sprintf("the deadline was moved from %s to %s", instantText(e.Text("from")), instantText(e.Text("to")))
	case orders.EventRetimed:
		what := "a timed message came before the deadline"
		if orders.Result(e.Text("result")) == orders.ResultHeld {
			what = "a timed message came while the order was held"
		}
		return fmt.Sprintf("%s; another is to be sent for %s", what, instantText(e.Text("deliver_at")))
	case orders.EventRefund:
		text := fmt.Sprintf("%s %s of transaction %s of %s cannot stay (%s)", e.Text("refund"), e.Text("currency"), e.Text("transaction_id"), e.Text("gateway"), e.Text("reason"))
		for _, r := range t.Refunds {
			if r.Gateway == e.Text("gateway") && r.TransactionID == e.Text("transaction_id") {
				if r.State == "pending" { // what ended it has an event of its own
					text += "; they " + refundState(r, t.Now)
				}
			}
		}
		return text
	case orders.EventRefunded:
		return fmt.Sprintf("%s %s of transaction %s were given back (refund %s)", e.Text("refund"), e.Text("currency"), e.Text("transaction_id"), e.Text("gateway_refund_id"))
	case orders.EventRefundGivenUp:
		return fmt.Sprintf("%s %s of transaction %s were not given back: given up, because %s", e.Text("refund"), e.Text("currency"), e.Text("transaction_id"), e.Text("because"))
	case orders.EventHeld:
		return fmt.Sprintf("due, and held until %s, because %s", instantText(e.Text("until")), e.Text("reason"))
	case orders.EventGateway:
		if e.Text("answer") == orders.AnswerNotAsked {
			return fmt.Sprintf("the gateway needs to be told \"%s\" no more: %s", e.Text("call"), e.Text("because"))
		}
		return fmt.Sprintf("the gateway answered \"%s\" to \"%s\", at attempt %s", e.Text("answer"), e.Text("call"), e.Text("attempts"))
	case orders.EventParked:
		if id := e.Text("message_id"); id != "" {
			return fmt.Sprintf("the timed message %s with it was parked: %s", id, e.Text("reason"))
		}
		if id := e.Text("event_id"); id != "" {
			return fmt.Sprintf("event %s, which tells other systems of it, was parked: %s", id, e.Text("reason"))
		}
		return "parked: " + e.Text("reason")
	case orders.EventRetried:
		return fmt.Sprintf("parked %s was given back to the normal path", e.Text("parked"))
	case orders.EventDiscarded:
		return fmt.Sprintf("parked %s was discarded: \"%s\"", e.Text("parked"), e.Text("reason"))
	case orders.EventStockMissing:
		return fmt.Sprintf("the stock of %s did not have the %s pieces that were to be moved (%s)", e.Text("sku"), e.Text("quantity"), e.Text("move"))
	case orders.EventReconciled:
		return fmt.Sprintf("run %s of reconcile found it overdue: %s", e.Text("run"), e.Text("because"))
	}
	return strings.TrimSpace(strings.ReplaceAll(e.Kind, "_", " ") + " " + string(e.Detail))
}

func instantText(text string) string {
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return text
	}
	return when(at)
}

func saysPaid(p orders.RecordedPayment) string {
	if p.PaidAt == nil {
		return ""
	}
	return fmt.Sprintf(" (the gateway says: on %s)", when(*p.PaidAt))
}

// toldOf says that an event of a kind tells of a payment.
func (t *teller) toldOf(kind, gateway, transaction string) bool {
	return slices.ContainsFunc(t.Events, func(e orders.Event) bool {
		return e.Kind == kind && e.Text("gateway") == gateway && e.Text("transaction_id") == transaction
	})
}

// addPayments tells of payments whose events do not.
func (t *teller) addPayments(add adder) {
	for _, p := range t.Payments {
		if p.Outcome != orders.PaymentAccepted || !t.toldOf(orders.EventPaid, p.Gateway, p.TransactionID) {
			add(p.ReceivedAt, "payment", "gateway:"+p.Gateway, "%s, transaction %s: %s%s", money(p.Amount, p.Currency), p.TransactionID, p.Outcome, saysPaid(p))
		}
	}
}

// addOwed tells of what the gateway still has to be told, and of refunds whose events do not.
func (t *teller) addOwed(add adder) {
	for _, task := range t.Tasks {
		text := ""
		if task.LastError != "" {
			text = "; " + failures(task.Attempts, task.LastError)
		}
		at := task.AvailableAt
		if at.Before(t.Now) {
			at = t.Now
		}
		add(at, "task", "", "the gateway is told again: %s%s", task.Kind, text)
	}
	for _, r := range t.Refunds {
		if !t.toldOf(orders.EventRefund, r.Gateway, r.TransactionID) {
			add(r.CreatedAt, orders.EventRefund, "", "%s %s (transaction %s of %s) %s", money(r.Amount, r.Currency), whyBack(r.Reason), r.TransactionID, r.Gateway, refundState(r, t.Now))
		}
	}
}

// addParked tells of what is parked, where no event does.
func (t *teller) addParked(add adder) {
	told := func(kind string, at time.Time) bool {
		return slices.ContainsFunc(t.Events, func(e orders.Event) bool { return e.Kind == kind && e.At.Equal(at) })
	}
	for _, p := range t.Parked {
		if !told(orders.EventParked, p.LastAt) {
			add(p.LastAt, orders.EventParked, "", "%s %s was parked: %s", p.What, p.Ref, p.Reason)
		}
		if p.HandledAt == nil {
			continue
		}
		switch {
		case p.HandledReason != "" && !told(orders.EventDiscarded, *p.HandledAt):
			add(*p.HandledAt, orders.EventDiscarded, p.HandledBy, "parked %d was discarded: \"%s\"", p.ID, p.HandledReason)
		case p.HandledReason == "" && !told(orders.EventRetried, *p.HandledAt):
			add(*p.HandledAt, orders.EventRetried, p.HandledBy, "parked %d was retried; the order was left as it is", p.ID)
		}
	}
}
