// The money that has to go back in a demo: lapse refund, a process of the binary, and a payment service for it to ask.

package trial

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lapse-orders/lapse/internal/payments/paytest"
	"github.com/lapse-orders/lapse/orders"
)

// MoneyBack is what went back through the payment service.
type MoneyBack struct {
	Refunds int   `json:"refunds"`       // that the service made for orders of this run, each once
	Amount  int64 `json:"amount,string"` // their sum, minor units
	Calls   int   `json:"calls"`         // that asked for them
}

// refundsWithin bounds the waiting for the last refund: each takes milliseconds, and a claim comes every refundPoll.
const (
	refundsWithin = 30 * time.Second
	refundPoll    = 200 * time.Millisecond
)

// openGateway starts the payment service, unless the database has payments of another one. lapse refund works for one gateway and sets the
// refunds of others aside: they are not a demo's to touch.
func (d *demo) openGateway(ctx context.Context) error {
	var others bool
	err := d.reader.DB().QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM payments WHERE gateway < ?) OR EXISTS (SELECT 1 FROM payments WHERE gateway > ?)", gateway, gateway).Scan(&others)
	if err != nil {
		return fmt.Errorf("look for payments of others: %w", err)
	}
	if others {
		d.display.Say("%s  the refunds are left alone: this database has payments of another gateway", clock(time.Since(d.started)))
		return nil
	}
	d.service = paytest.New()
	return nil
}

// environment is that of the processes, with the secret of the payment service in the place of any other's.
func (d *demo) environment() []string {
	env := slices.DeleteFunc(slices.Clone(d.cfg.Env), func(v string) bool { return strings.HasPrefix(v, "LAPSE_GATEWAY_") })
	return append(env, "LAPSE_GATEWAY_SECRET="+paytest.Secret)
}

// refundArgs gives the arguments of lapse refund. No other process knows the payment service: it knows no order before its payment, and the
// shop's customers pay without a page.
func (d *demo) refundArgs() []string {
	return append(d.args("refund"), "--set", "gateway.url="+d.service.URL, "--set", "gateway.name="+gateway, "--set", "refund.poll="+refundPoll.String())
}

// awaitRefunds waits until no refund of the run is pending, or until its time is up: the checks then say which is.
func (d *demo) awaitRefunds(ctx context.Context) error {
	giveUp := time.Now().Add(refundsWithin)
	for {
		var n int
		err := d.reader.DB().QueryRowContext(ctx, "SELECT COUNT(*) FROM refunds WHERE order_id >= ? AND gateway = ? AND state = 'pending'", d.minID, gateway).Scan(&n)
		switch {
		case err != nil:
			return fmt.Errorf("count the pending refunds: %w", err)
		case n == 0 || time.Now().After(giveUp):
			return nil
		}
		if !waitUntil(ctx, time.Now().Add(refundPoll)) {
			return ctx.Err()
		}
	}
}

// compareMoneyBack holds the refunds in the database against what the payment service has given back.
func compareMoneyBack(rows map[int64]Row, minID int64, made []paytest.Refund) (orders.Check, *MoneyBack) {
	v := newVerdict("refunds_are_made", "every refund was made by the payment service, once and of its amount, and no other money went back")
	v.Invariant = "I4"
	var m MoneyBack
	at := map[string]paytest.Refund{}
	for _, r := range made {
		id, err := orders.ParseID(r.OrderID)
		if err == nil && id < minID {
			continue // of an earlier run, which was interrupted
		}
		m.Refunds++
		m.Amount += r.Amount
		m.Calls += r.Calls
		row := rows[id]
		p, found := row.Payments[r.TransactionID]
		_, twice := at[r.TransactionID]
		switch {
		case err != nil || !found || p.Refund == 0:
			v.broken(id, "%d of payment %s went back, and there is no such refund", r.Amount, r.TransactionID)
		case twice:
			v.broken(id, "%d of payment %s went back, once more", r.Amount, r.TransactionID)
		}
		at[r.TransactionID] = r
	}
	for id, row := range rows {
		for transaction, p := range row.Payments {
			if p.Refund == 0 {
				continue
			}
			v.Rows++
			switch r, given := at[transaction]; {
			case !given:
				v.broken(id, "a refund of %d for payment %s is %s, and the payment service has not made it", p.Refund, transaction, p.RefundState)
			case r.Amount != p.Refund:
				v.broken(id, "a refund of %d for payment %s, and %d went back", p.Refund, transaction, r.Amount)
			case p.RefundState != "done":
				v.broken(id, "a refund of %d for payment %s was made, and is %s", p.Refund, transaction, p.RefundState)
			}
		}
	}
	return v.Check, &m
}

func (r Report) printMoneyBack(b *strings.Builder, s Style) {
	if m := r.MoneyBack; m != nil {
		fmt.Fprintf(b, "%s made by lapse refund: %d, %s %s\n", s.paint(bold, "refunds"), m.Refunds, money(m.Amount), currency)
	}
}
