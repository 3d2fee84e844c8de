package orders_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// park sets something aside and gives its id.
func (b *bundle) park(p orders.Parked) int64 {
	b.t.Helper()
	if p.Reason == "" {
		p.Reason = "it failed"
	}
	if err := b.store.Park(b.ctx, p); err != nil {
		b.t.Fatal(err)
	}
	return b.db.Int(b.t, "SELECT id FROM parked WHERE what = ? AND ref = ?", p.What, p.Ref)
}

func (b *bundle) parkOrder(id int64) int64 {
	b.t.Helper()
	return b.park(orders.Parked{What: orders.ParkedOrder, Ref: orders.FormatID(id)})
}

// parkMessage parks a timed message with these texts as its orders.
func (b *bundle) parkMessage(ref string, ids ...string) int64 {
	b.t.Helper()
	body, err := orders.EncodeExpiry(orders.Expiry{Due: noon, Orders: ids})
	if err != nil {
		b.t.Fatal(err)
	}
	return b.park(orders.Parked{What: orders.ParkedMessage, Ref: ref, Body: body})
}

func (b *bundle) retry(id int64) orders.Retry {
	b.t.Helper()
	r, err := b.store.RetryParked(b.ctx, id, "ann")
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

// Each state of an order, parked, meets a retry. A final order, and one without a deadline, keep every row as it was but that of what is parked.
func TestRetryOfAParkedOrderGivesItBackToTheRelayOrLeavesItAsItIs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b = b.on(b.at(noon, orders.Config{}))
	b.db.Exec(t, "ALTER TABLE orders DROP CONSTRAINT orders_status_known")
	var resent []int64
	want := map[string]orders.RetryResult{
		"due": orders.RetryResend, "due_now": orders.RetryResend, "soon": orders.RetryResend, "early": orders.RetryResend,
		"held": orders.RetryResend, "held_soon": orders.RetryResend, "hold_over": orders.RetryResend,
		"exempt": orders.RetryExempt, "paid": orders.RetryFinal, "timed_out": orders.RetryFinal, "by_hand": orders.RetryFinal,
		"unknown": "", "missing": "",
	}
	for _, state := range states {
		id := orders.NewID()
		sku := "sku-" + state.name
		b.stock(sku, 10)
		state.make(b, orders.NewOrder{ID: id, Currency: "EUR", Amount: 1000, Items: []orders.Item{{SKU: sku, Quantity: 3, Price: 1}}})
		deadline := b.db.Text(t, "SELECT CAST(MAX(deadline_at) AS CHAR) FROM orders WHERE id = ?", id)
		parked := b.parkOrder(id)
		// As the relay leaves a row whose message the broker refuses.
		b.db.Exec(t, "UPDATE outbox SET state = 'parked', attempts = 4, last_error = 'refused', available_at = ? WHERE order_id = ?", sqlText(noon.Add(-time.Hour)), id)
		before := b.picture(id, sku)
		result, known := want[state.name]
		if !known {
			t.Errorf("%s: this state is not in the table", state.name)
		}
		r, err := b.store.RetryParked(b.ctx, parked, "ann")
		if result == "" {
			if !errors.Is(err, orders.ErrCannotRetry) || b.picture(id, sku) != before {
				t.Errorf("%s: %v; want ErrCannotRetry and nothing written\n%s\n%s", state.name, err, before, b.picture(id, sku))
			}
			if got := b.db.Text(t, "SELECT state FROM parked WHERE id = ?", parked); got != orders.StateParked {
				t.Errorf("%s: it is %s after a refused retry", state.name, got)
			}
			continue
		}
		if err != nil || !r.Done || len(r.Orders) != 1 || r.Orders[0] != (orders.RetriedOrder{ID: orders.FormatID(id), Result: result}) {
			t.Errorf("%s: %+v, %v; want %s", state.name, r, err, result)
		}
		p, err := b.store.GetParked(b.ctx, parked)
		if err != nil || p.State != orders.StateRetried || p.HandledBy != "ann" || p.HandledAt == nil || !p.HandledAt.Equal(noon) || p.HandledReason != "" {
			t.Errorf("%s: parked is %+v, %v", state.name, p, err)
		}
		if result != orders.RetryResend {
			if got := b.picture(id, sku); got != before {
				t.Errorf("%s: a retry wrote\n%s, before\n%s", state.name, got, before)
			}
			continue
		}
		row := b.row(id)
		if row.State != "pending" || sqlText(row.DeliverAt) != deadline || !row.AvailableAt.Equal(noon) || row.Attempts != 0 || row.LastError != "" || row.Leased {
			t.Errorf("%s: the outbox row is %+v, the deadline %s", state.name, row, deadline)
		}
		o := b.get(id)
		if o.Status != orders.Unpaid || o.HoldUntil != nil || o.HoldReason != "" {
			t.Errorf("%s: the order is %+v", state.name, o)
		}
		events, err := b.store.Events(b.ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		if last := events[len(events)-1]; last.Kind != orders.EventRetried || last.Actor != "ann" || last.Text("parked") != fmt.Sprint(parked) || last.Text("reason") != "it failed" {
			t.Errorf("%s: the last event is %+v", state.name, last)
		}
		resent = append(resent, id)
		written := b.picture(id, sku)
		again := b.retry(parked)
		if again.Done || again.Parked.State != orders.StateRetried || b.picture(id, sku) != written {
			t.Errorf("%s: a second retry is %+v and wrote\n%s, before\n%s", state.name, again, b.picture(id, sku), written)
		}
	}
	b.cancelDue(resent...) // as when their messages come
	b.db.Exec(t, "UPDATE orders SET status = 'unpaid' WHERE status = 'shipped'")
	b.wantClean()
}

// A message is never sent again as it was: its ids are read, and each order's own row is timed anew.
func TestRetryOfAParkedMessageTimesEachOfItsOrdersAnew(t *testing.T) {
	t.Parallel()
	b := setup(t)
	due, paid := b.place(overdue).ID, b.place().ID
	b.pay(paid)
	missing := orders.NewID()
	b.db.Exec(t, "UPDATE outbox SET state = 'sent', message_id = 'm1', sent_at = UTC_TIMESTAMP(3)")
	parked := b.parkMessage("m1", orders.FormatID(due), orders.FormatID(paid), orders.FormatID(missing), "shop-7", orders.FormatID(due))
	for _, id := range []int64{due, paid, missing} {
		if got := b.kinds(id); !strings.HasSuffix(got, orders.EventParked) {
			t.Errorf("the story of %d does not say that its message was parked: %s", id, got)
		}
	}
	r := b.retry(parked)
	want := []orders.RetriedOrder{
		{ID: orders.FormatID(due), Result: orders.RetryResend}, {ID: orders.FormatID(paid), Result: orders.RetryFinal},
		{ID: orders.FormatID(missing), Result: orders.RetryNotFound}, {ID: "shop-7", Result: orders.RetryNotFound},
	}
	if !r.Done || !slices.Equal(r.Orders, want) {
		t.Errorf("%+v\nwant %+v", r, want)
	}
	if got := b.row(due).State + " " + b.row(paid).State; got != "pending sent" {
		t.Errorf("the outbox rows are %s", got)
	}
	if got := b.kinds(due) + "; " + b.kinds(paid) + "; " + b.kinds(missing); got != "placed parked retried; placed paid parked; parked" {
		t.Errorf("the stories are %s", got)
	}
	// The normal path from here on: claimed at once, and cancelled once it comes.
	if c := b.claim(10, time.Minute); len(c.Rows) != 1 || c.Rows[0].OrderID != due {
		t.Errorf("the relay claims %+v", c.Rows)
	}
	if out := b.cancelDue(due, paid); out[0].Result != orders.ResultCancelled || out[1].Result != orders.ResultAlreadyPaid {
		t.Errorf("%+v", out)
	}
	b.wantClean()
}

func TestWhatNoRetryCanHelpIsRefusedWithAWayOut(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, tc := range map[string]struct {
		parked orders.Parked
		says   string
	}{
		"a message that is no JSON":        {orders.Parked{What: orders.ParkedMessage, Ref: "m1", Body: []byte("\x00\xff")}, "cannot be read"},
		"a message without a body":         {orders.Parked{What: orders.ParkedMessage, Ref: "m2"}, "no body"},
		"a message of a newer version":     {orders.Parked{What: orders.ParkedMessage, Ref: "m3", Body: []byte(`{"v":2}`)}, "with the lapse of that version"},
		"a message of unknown orders":      {orders.Parked{What: orders.ParkedMessage, Ref: "m4", Body: []byte(`{"v":1,"due":"2027-01-15T12:00:00.000Z","orders":["7","x"]}`)}, "none of the 2 orders"},
		"an order with an id of elsewhere": {orders.Parked{What: orders.ParkedOrder, Ref: "shop-7"}, `"shop-7" is no id`},
		"an order that does not exist":     {orders.Parked{What: orders.ParkedOrder, Ref: "7"}, "no order 7"},
		"a payment without a refund":       {orders.Parked{What: orders.ParkedPayment, Ref: "bank:t1"}, "the gateway's own records"},
	} {
		id := b.park(tc.parked)
		_, err := b.store.RetryParked(b.ctx, id, "ann")
		if !errors.Is(err, orders.ErrCannotRetry) || !strings.Contains(err.Error(), tc.says) || !strings.Contains(err.Error(), "discard it") && !strings.Contains(err.Error(), "of that version") {
			t.Errorf("%s: %v", name, err)
		}
		if got := b.db.Text(t, "SELECT CONCAT(state, COALESCE(handled_by, '')) FROM parked WHERE id = ?", id); got != "parked" {
			t.Errorf("%s: it is %s", name, got)
		}
	}
	if _, err := b.store.RetryParked(b.ctx, 999, "ann"); !errors.Is(err, orders.ErrNotParked) {
		t.Errorf("%v", err)
	}
	if _, err := b.store.RetryParked(b.ctx, 1, ""); !errors.Is(err, orders.ErrInvalid) {
		t.Errorf("%v", err)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM outbox"); n != 0 {
		t.Errorf("%d outbox rows were written", n)
	}
}

func TestRetryOfAParkedPaymentTriesTheRefundAgainThatWasGivenUp(t *testing.T) {
	t.Parallel()
	b := setup(t)
	// The colons stand in both names: which of them is between the two is not to be guessed. The second pair fills the column.
	long := strings.Repeat("g", 64)
	for _, p := range []orders.Payment{{Gateway: "eu:bank", TransactionID: "a:b"}, {Gateway: long, TransactionID: strings.Repeat("t", 64)}} {
		o := b.place()
		if _, err := b.store.Cancel(b.ctx, o.ID, "u1", "no more"); err != nil {
			t.Fatal(err)
		}
		p.OrderID, p.Currency, p.Amount = o.ID, "EUR", 1000
		if r, err := b.store.RecordPayment(b.ctx, p); err != nil || r.Refund != 1000 {
			t.Fatal(r, err)
		}
		id := b.park(orders.Parked{What: orders.ParkedPayment, Ref: p.Gateway + ":" + p.TransactionID})
		for _, state := range []string{"pending", "done"} {
			b.db.Exec(t, "UPDATE refunds SET state = ? WHERE gateway = ?", state, p.Gateway)
			if _, err := b.store.RetryParked(b.ctx, id, "ann"); !errors.Is(err, orders.ErrCannotRetry) || !strings.Contains(err.Error(), "is "+state) {
				t.Errorf("%s: %v", state, err)
			}
		}
		b.db.Exec(t, "UPDATE refunds SET state = 'given_up', attempts = 9, lease_token = REPEAT('a', 32), available_at = '2020-01-01', last_error = 'closed account' WHERE gateway = ?", p.Gateway)
		if r := b.retry(id); !r.Done || !r.Refund || len(r.Orders) != 0 {
			t.Errorf("%+v", r)
		}
		if got := b.db.Text(t, "SELECT CONCAT_WS(' ', state, attempts, COALESCE(lease_token, 'free'), available_at > '2020-01-01', last_error) FROM refunds WHERE gateway = ?", p.Gateway); got != "pending 0 free 1 closed account" {
			t.Errorf("the refund is %s", got)
		}
		if got := b.kinds(o.ID); got != "placed cancelled refund retried" {
			t.Errorf("the story is %s", got)
		}
		if r := b.retry(id); r.Done {
			t.Errorf("a second retry is %+v", r)
		}
	}
	b.wantClean()
}

func TestADiscardTakesAReasonAndChangesNothingElse(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(overdue)
	inMessage := b.place(overdue)
	ids := []int64{b.parkOrder(o.ID), b.parkMessage("m1", orders.FormatID(inMessage.ID)), b.park(orders.Parked{What: orders.ParkedMessage, Ref: "m2", Body: []byte("{")}), b.park(orders.Parked{What: orders.ParkedPayment, Ref: "bank:t1"})}
	for _, reason := range []string{"", " \n"} {
		if _, _, err := b.store.DiscardParked(b.ctx, ids[0], "ann", reason); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("reason %q: %v", reason, err)
		}
	}
	before := b.row(o.ID)
	for i, id := range ids {
		row, done, err := b.store.DiscardParked(b.ctx, id, "ann", "  a trial order ")
		if err != nil || !done || row.State != orders.StateDiscarded || row.HandledBy != "ann" || row.HandledReason != "a trial order" || row.HandledAt == nil {
			t.Errorf("%d: %+v, %t, %v", i, row, done, err)
		}
		stored, err := b.store.GetParked(b.ctx, id)
		if err != nil || stored.State != row.State || stored.HandledReason != row.HandledReason || !stored.HandledAt.Equal(*row.HandledAt) {
			t.Errorf("%d: stored is %+v, %v; told was %+v", i, stored, err, row)
		}
		if row, done, err := b.store.DiscardParked(b.ctx, id, "bob", "another"); err != nil || done || row.HandledBy != "ann" {
			t.Errorf("%d: a second discard: %+v, %t, %v", i, row, done, err)
		}
		if r := b.retry(id); r.Done || r.Parked.State != orders.StateDiscarded {
			t.Errorf("%d: a retry of what was discarded: %+v", i, r)
		}
	}
	if after := b.row(o.ID); after != before {
		t.Errorf("the outbox row was %+v and is %+v", before, after)
	}
	for _, id := range []int64{o.ID, inMessage.ID} {
		events, err := b.store.Events(b.ctx, id)
		if err != nil || len(events) != 3 {
			t.Fatalf("%+v, %v", events, err)
		}
		if last := events[2]; last.Kind != orders.EventDiscarded || last.Actor != "ann" || last.Text("reason") != "a trial order" {
			t.Errorf("the last event is %+v", last)
		}
	}
	if _, _, err := b.store.DiscardParked(b.ctx, 999, "ann", "x"); !errors.Is(err, orders.ErrNotParked) {
		t.Errorf("%v", err)
	}
	if st, err := b.store.Stats(b.ctx); err != nil || st.Parked != 0 {
		t.Errorf("%+v, %v", st, err)
	}
}

func TestWhatFailsAgainAfterARetryIsParkedAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place(overdue)
	id := b.parkOrder(o.ID)
	b.retry(id)
	if again := b.park(orders.Parked{What: orders.ParkedOrder, Ref: orders.FormatID(o.ID), Reason: "it failed otherwise"}); again != id {
		t.Fatalf("it is parked as %d, was %d", again, id)
	}
	p, err := b.store.GetParked(b.ctx, id)
	if err != nil || p.State != orders.StateParked || p.Times != 2 || p.Reason != "it failed otherwise" || p.HandledBy != "ann" {
		t.Errorf("%+v, %v", p, err)
	}
	if list, err := b.store.ListParked(b.ctx, orders.ParkedFilter{}); err != nil || len(list) != 1 || list[0].ID != id {
		t.Errorf("%+v, %v", list, err)
	}
	if r := b.retry(id); !r.Done {
		t.Errorf("%+v", r)
	}
	if _, done, err := b.store.DiscardParked(b.ctx, b.parkOrder(o.ID), "ann", "enough"); err != nil || !done {
		t.Errorf("%t, %v", done, err)
	}
}

func TestOfManyWhoRetryOrDiscardAtOnceOneDoesIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for range 3 {
		ids := make([]string, 20)
		for i := range ids {
			ids[i] = orders.FormatID(b.place(overdue).ID)
		}
		parked := b.parkMessage("m"+ids[0], ids...)
		var wg sync.WaitGroup
		var mu sync.Mutex // guards both
		retried, discarded := 0, 0
		for i := range 8 {
			wg.Go(func() {
				var done bool
				var err error
				if i%2 == 0 {
					var r orders.Retry
					r, err = b.store.RetryParked(b.ctx, parked, "ann")
					done = r.Done
				} else {
					_, done, err = b.store.DiscardParked(b.ctx, parked, "bob", "no")
				}
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err != nil:
					t.Error(err)
				case done && i%2 == 0:
					retried++
				case done:
					discarded++
				}
			})
		}
		wg.Wait()
		if retried+discarded != 1 {
			t.Errorf("%d retried it and %d discarded it", retried, discarded)
		}
		if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE kind IN ('retried', 'discarded') AND order_id IN ("+strings.Join(ids, ",")+")"); n != 20 {
			t.Errorf("%d events, want one for each of 20 orders", n)
		}
		if _, err := b.store.CancelDue(b.ctx, ids); err != nil {
			t.Fatal(err)
		}
	}
	b.wantClean()
}

func TestTheListIsPagedByTimeAndFilteredByEverythingItShows(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var all []int64 // newest first
	var at *bundle
	for i := range 30 {
		if i%3 == 0 { // three at each instant: the page's edge lies between equals
			at = b.on(b.at(noon.Add(time.Duration(i/3)*time.Second), orders.Config{MaxOpenConns: 1}))
		}
		p := orders.Parked{What: []string{orders.ParkedOrder, orders.ParkedMessage, orders.ParkedPayment}[i%3], Ref: fmt.Sprint("shop-", i), Reason: fmt.Sprintf("100%% wrong: Cause %d", i%5), Body: []byte("body")}
		all = append([]int64{at.park(p)}, all...)
	}
	list := func(f orders.ParkedFilter) (ids []int64) {
		t.Helper()
		rows, err := b.store.ListParked(b.ctx, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range rows {
			if p.Size != 4 || p.Body != nil {
				t.Errorf("%+v has a body, or no size", p)
			}
			ids = append(ids, p.ID)
		}
		return ids
	}
	b.db.Exec(t, "UPDATE parked SET state = 'retried' WHERE id = ?", all[4])
	b.db.Exec(t, "UPDATE parked SET state = 'discarded' WHERE id = ?", all[5])
	every := []string{orders.StateParked, orders.StateRetried, orders.StateDiscarded}
	for _, size := range []int{1, 4, 7, 29, 30, 100} {
		var got []int64
		f := orders.ParkedFilter{States: every, Limit: size}
		for {
			page, err := b.store.ListParked(b.ctx, f)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range page {
				got = append(got, p.ID)
			}
			if len(page) < size {
				break
			}
			f.After = &page[len(page)-1]
		}
		if !slices.Equal(got, all) {
			t.Errorf("in pages of %d: %v\nwant %v", size, got, all)
		}
	}
	if got, want := list(orders.ParkedFilter{}), slices.Concat(all[:4], all[6:]); !slices.Equal(got, want) {
		t.Errorf("parked: %v\nwant %v", got, want)
	}
	if got := list(orders.ParkedFilter{States: []string{orders.StateDiscarded}}); !slices.Equal(got, all[5:6]) {
		t.Errorf("discarded: %v", got)
	}
	if got := list(orders.ParkedFilter{Since: noon.Add(9 * time.Second)}); !slices.Equal(got, all[:3]) {
		t.Errorf("since the last second: %v", got)
	}
	if got := list(orders.ParkedFilter{What: orders.ParkedPayment, Since: noon.Add(9 * time.Second)}); !slices.Equal(got, all[:1]) {
		t.Errorf("payments of the last second: %v", got)
	}
	if got := list(orders.ParkedFilter{States: every, Reason: "100% wrong: cause 3"}); len(got) != 6 {
		t.Errorf("by the reason: %v", got)
	}
	if got := list(orders.ParkedFilter{States: every, Reason: "1_0%"}); len(got) != 0 {
		t.Errorf("wildcards are no wildcards: %v", got)
	}
	for _, f := range []orders.ParkedFilter{{Limit: -1}, {Limit: 1001}, {What: "shop"}, {States: []string{"lost"}}} {
		if _, err := b.store.ListParked(b.ctx, f); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("%+v: %v", f, err)
		}
	}
}
