package trial

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// lostWorld gives a run of which the messages of the orders 1 to 5 were lost: 1 was paid, 2 was reached by another message, 3 and 4 are left to
// reconcile, which found them, and 5 was cancelled by hand; 6 to 8 are others, the last one parked.
func lostWorld() (lost loss, before map[int64]Row, r *Reconciled) {
	lost = loss{Messages: 100, Lost: 4, Orders: map[int64]bool{1: true, 2: false, 3: true, 4: true, 5: true}}
	before = map[int64]Row{
		1: {Status: orders.Paid},
		2: {Status: orders.Cancelled, Reason: orders.ReasonTimeout},
		3: {Status: orders.Unpaid, DeadlineAt: noon},
		4: {Status: orders.Unpaid, DeadlineAt: noon},
		5: {Status: orders.Cancelled, Reason: handReason},
		6: {Status: orders.Paid},
		7: {Status: orders.Cancelled, Reason: orders.ReasonTimeout},
		8: {Status: orders.Unpaid, SetAside: true},
	}
	r = &Reconciled{Run: 9, Took: 0.34, Lag: 0.1}
	for _, id := range []int64{3, 4} {
		r.Orders = append(r.Orders, ReconciledOrder{ID: id, Missed: orders.MissedNotReceived, run: 9,
			Because: "message 01A2B3 was sent at 2026-11-30 12:00:00.000 UTC, and no consumer has handled it"})
	}
	return lost, before, r
}

func TestWhatReconcileFoundIsHeldAgainstWhatWasLost(t *testing.T) {
	t.Parallel()
	if c := compareReconciled(lostWorld()); c.Violations != 0 || c.Rows != 8 || c.Invariant != "I3" {
		t.Errorf("%+v", c)
	}
	for name, test := range map[string]struct {
		change func(lost loss, before map[int64]Row, r *Reconciled)
		order  int64
		says   string
	}{
		"nothing of it was lost":        {func(l loss, _ map[int64]Row, _ *Reconciled) { delete(l.Orders, 3) }, 3, "though no message of it was lost"},
		"another message got through":   {func(l loss, _ map[int64]Row, _ *Reconciled) { l.Orders[4] = false }, 4, "though no message of it was lost"},
		"reconcile left one":            {func(_ loss, _ map[int64]Row, r *Reconciled) { r.Orders = r.Orders[:1] }, 4, "run 9 of reconcile did not cancel it"},
		"reconcile took a paid one":     {func(_ loss, _ map[int64]Row, r *Reconciled) { r.Orders = append(r.Orders, ReconciledOrder{ID: 6}) }, 6, "it was paid before"},
		"reconcile took a lost one":     {func(_ loss, b map[int64]Row, _ *Reconciled) { b[3] = Row{Status: orders.Cancelled, Reason: "timeout"} }, 3, "it was cancelled (timeout) before"},
		"reconcile says it wasn't sent": {func(_ loss, _ map[int64]Row, r *Reconciled) { r.Orders[0].Missed = orders.MissedNeverSent }, 3, "reconcile says: never sent"},
	} {
		lost, before, r := lostWorld()
		test.change(lost, before, r)
		c := compareReconciled(lost, before, r)
		if c.Violations != 1 || c.Examples[0].OrderID != test.order || !strings.Contains(c.Examples[0].Detail, test.says) {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

func TestWithoutLossesReconcileHasNothingToFind(t *testing.T) {
	t.Parallel()
	_, before, r := lostWorld()
	if c := compareReconciled(loss{}, before, r); c.Violations != 2 {
		t.Errorf("two orders were left by the message path: %+v", c)
	}
	for _, id := range []int64{3, 4} {
		before[id] = Row{Status: orders.Cancelled, Reason: orders.ReasonTimeout}
	}
	if c := compareReconciled(loss{}, before, &Reconciled{Run: 9}); c.Violations != 0 {
		t.Errorf("%+v", c)
	}
}

func TestLostOrdersAreSortedByWhatBecameOfThem(t *testing.T) {
	t.Parallel()
	lost, before, _ := lostWorld()
	if got, want := losses(5, lost, before), (Losses{Percent: 5, Messages: 100, Lost: 4, Orders: 5, Final: 2, Later: 1, Unpaid: 2}); *got != want {
		t.Errorf("%+v, want %+v", *got, want)
	}
}

func TestOrdersThatReconcileCancelledDoNotCountAsLateMessages(t *testing.T) {
	t.Parallel()
	rows := map[int64]Row{
		1: {Status: orders.Cancelled, Reason: orders.ReasonTimeout, DeadlineAt: noon, CancelledAt: noon.Add(90 * time.Millisecond)},
		2: {Status: orders.Cancelled, Reason: orders.ReasonTimeout, DeadlineAt: noon, CancelledAt: noon.Add(time.Minute), Reconciled: &ReconciledOrder{}},
	}
	if got, want := lateness(rows), (Lateness{Orders: 1, P50: 90, P99: 90, Max: 90}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	kills := []Kill{{at: noon}}
	if countLong(kills, rows); kills[0].Long != 0 {
		t.Errorf("%+v", kills)
	}
}

func TestAProcessThatRunsToItsEndGivesItsOutputAndItsCode(t *testing.T) {
	t.Parallel()
	c, died := newTestCrew(t, "dies")
	ended, err := c.run(t.Context(), "reconcile")
	if err != nil || ended.code != 7 || string(ended.stdout) != "first line\nthe last thing it said\n" {
		t.Errorf("%q, code %d, %v", ended.stdout, ended.code, err)
	}
	if len(died) != 0 {
		t.Errorf("its end counts as unasked: %v", <-died)
	}
	c, _ = newTestCrew(t, "deaf")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := c.run(ctx, "reconcile", "http.addr=127.0.0.1:0"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("cut off: %v", err)
	}
	if err := c.end(0); err != nil {
		t.Errorf("it was left: %v", err)
	}
}
