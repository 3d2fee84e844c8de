// The end of a demo: a run of reconcile, a process of the binary on the real replica, and what it had to find.

package trial

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// Losses says what became of the messages that were lost on purpose, and of their orders.
type Losses struct {
	Percent  float64 `json:"percent"`
	Messages int     `json:"messages"` // timed messages that the relay has sent, each attempt counted
	Lost     int     `json:"lost"`     // of these
	Orders   int     `json:"orders"`   // that were in the lost ones: the sum of the following
	Final    int     `json:"paid_or_cancelled_by_hand"`
	Later    int     `json:"reached_by_another_message"` // after an extension, for one
	Unpaid   int     `json:"unpaid_past_their_deadlines"`
}

// Reconciled is what the run of reconcile at the end did.
type Reconciled struct {
	Run    int64   `json:"run,string"`
	Took   float64 `json:"took_seconds"`
	Lag    float64 `json:"lag_seconds"` // until the replica showed what the run had written on the primary
	Others int64   `json:"others"`      // orders of other runs in the same database that it cancelled, too
	// Orders are those of this run that it cancelled, by id.
	Orders []ReconciledOrder `json:"orders"`
}

// ReconciledOrder is an order that reconcile cancelled, and why no message had done it.
type ReconciledOrder struct {
	ID      int64         `json:"order_id,string"`
	Missed  orders.Missed `json:"missed"`
	Because string        `json:"because"`

	run int64 // of reconcile
}

const (
	// reconcileGrace takes the place of reconcile.grace, which is minutes: every message has had its time when the run begins.
	reconcileGrace = time.Second
	// reconcileLag takes the place of reconcile.max_lag: a demo waits rather than end for a replica that others keep busy.
	reconcileLag = 2 * time.Minute
	// reconcileWithin bounds a run, with the waiting for the replica.
	reconcileWithin = 3 * time.Minute
)

// reconcile runs reconcile once on the orders of this run, and gives their rows as it found them. ahead is how far the database's clock is
// ahead.
func (d *demo) reconcile(ctx context.Context, crew *crew, ahead time.Duration) (before map[int64]Row, _ *Reconciled, err error) {
	_, _, last := d.ledger.Counts()
	if before, err = ReadRows(ctx, d.reader.DB(), d.name, d.minID); err != nil {
		return nil, nil, err
	}
	// Bounded by the deadlines of this run, so that it leaves the orders of others to the message path, which has a longer grace.
	from, until := d.started.Add(ahead), last.Add(time.Second)
	if overdue := overdueIn(before); len(overdue) > 0 && !waitUntil(ctx, last.Add(-ahead).Add(reconcileGrace+100*time.Millisecond)) {
		return nil, nil, ctx.Err()
	}
	d.display.Say("%s  running reconcile on the replica", clock(time.Since(d.started)))
	var told struct {
		RunID     int64         `json:"run_id,string"`
		Cancelled int64         `json:"cancelled"`
		Duration  time.Duration `json:"duration_ns"`
		Lag       time.Duration `json:"lag_ns"`
	}
	within, cancel := context.WithTimeout(ctx, reconcileWithin)
	defer cancel()
	args := append(d.args("reconcile", "--once", "--json", "--from", from.UTC().Format(time.RFC3339Nano), "--until", until.UTC().Format(time.RFC3339Nano)),
		"--set", "reconcile.grace="+reconcileGrace.String(), "--set", "reconcile.max_lag="+reconcileLag.String())
	for told.RunID == 0 {
		ran, err := crew.run(within, "reconcile", args...)
		switch {
		case err != nil:
			return nil, nil, err
		case ran.code == exitMissing:
			return nil, nil, fmt.Errorf("the replica is %w, or cannot be relied on; bring it up: %s; the last words of reconcile:\n%s", ErrMissing, withReplica, ran.lastWords)
		case ran.code != 0:
			return nil, nil, fmt.Errorf("reconcile ended with exit status %d; its last words:\n%s", ran.code, ran.lastWords)
		}
		if len(ran.stdout) > 0 {
			if err := json.Unmarshal(ran.stdout, &told); err != nil {
				return nil, nil, fmt.Errorf("read what reconcile reports: %w: %.200q", err, ran.stdout)
			}
		} else if !waitUntil(within, time.Now().Add(time.Second)) {
			// Without a report another run is at work, which may have looked at the orders too early.
			return nil, nil, fmt.Errorf("another run of reconcile does not end: %w", within.Err())
		}
	}
	r := &Reconciled{Run: told.RunID, Took: told.Duration.Seconds(), Lag: told.Lag.Seconds(), Others: told.Cancelled, Orders: []ReconciledOrder{}}
	after, err := ReadRows(ctx, d.reader.DB(), d.name, d.minID)
	if err != nil {
		return nil, nil, err
	}
	for _, id := range slices.Sorted(maps.Keys(after)) {
		if o := after[id].Reconciled; o != nil && o.run == told.RunID {
			r.Orders = append(r.Orders, *o)
			r.Others--
		}
	}
	return before, r, nil
}

// exitMissing is the exit code of the binary when a server is not there.
const exitMissing = 3

// overdueIn gives the orders that are unpaid and neither held nor parked, by id. All deadlines have to be over.
func overdueIn(rows map[int64]Row) []int64 {
	var ids []int64
	for _, id := range slices.Sorted(maps.Keys(rows)) {
		if r := rows[id]; r.Status == orders.Unpaid && !r.SetAside {
			ids = append(ids, id)
		}
	}
	return ids
}

// losses sums up what became of what was lost: before is what the database had when all deadlines were over and before reconcile ran.
func losses(percent float64, lost loss, before map[int64]Row) *Losses {
	l := &Losses{Percent: percent, Messages: lost.Messages, Lost: lost.Lost, Orders: len(lost.Orders)}
	for id := range lost.Orders {
		switch r := before[id]; {
		case r.Status == orders.Unpaid:
			l.Unpaid++
		case r.byTimeout():
			l.Later++
		default:
			l.Final++
		}
	}
	return l
}

const reconcileCheck = "reconcile_finds_the_rest"

// compareReconciled holds what reconcile did against what it had to find: the orders that were unpaid past their deadlines, of which each has
// to be one that was lost.
func compareReconciled(lost loss, before map[int64]Row, r *Reconciled) orders.Check {
	v := newVerdict(reconcileCheck, "past its deadline an order is unpaid only if its message was lost on purpose, and reconcile cancels exactly those")
	v.Invariant = "I3"
	v.Rows = int64(len(before))
	overdue := overdueIn(before)
	for _, id := range overdue {
		if !lost.Orders[id] {
			v.broken(id, "unpaid past its deadline, %s, though no message of it was lost on purpose", before[id].DeadlineAt.Format(time.RFC3339Nano))
		}
		if !slices.ContainsFunc(r.Orders, func(o ReconciledOrder) bool { return o.ID == id }) {
			v.broken(id, "unpaid past its deadline, and run %d of reconcile did not cancel it", r.Run)
		}
	}
	for _, o := range r.Orders {
		_, found := slices.BinarySearch(overdue, o.ID)
		switch {
		case !found:
			v.broken(o.ID, "run %d of reconcile cancelled it, and it was %s before", r.Run, describe(before[o.ID]))
		case lost.Orders[o.ID] && o.Missed != orders.MissedNotReceived:
			v.broken(o.ID, "its message was sent and lost, and reconcile says: %s, %s", inWords(o.Missed), o.Because)
		}
	}
	return v.Check
}

// inWords writes a reason for a person.
func inWords(m orders.Missed) string {
	switch m {
	case orders.MissedNeverSent:
		return "never sent"
	case orders.MissedNotReceived:
		return "sent, not received"
	case orders.MissedParked:
		return "parked"
	}
	return string(m)
}

func (r Report) printReconcile(b *strings.Builder, s Style) {
	paragraph := func(head, text string) {
		lines := wrap(head+" "+text, s.Width)
		fmt.Fprintln(b, s.paint(bold, head)+strings.TrimPrefix(lines[0], head))
		for _, more := range lines[1:] {
			fmt.Fprintln(b, "  "+more)
		}
	}
	if l := r.Losses; l != nil {
		paragraph("lost", fmt.Sprintf("on purpose: %d of %d timed messages, with %d %s: %d paid or cancelled by hand, %d reached by another message, %d unpaid past %s",
			l.Lost, l.Messages, l.Orders, plural(int64(l.Orders), "order"), l.Final, l.Later, l.Unpaid, map[bool]string{true: "its deadline", false: "their deadlines"}[l.Unpaid == 1]))
	}
	if r.Reconcile == nil {
		return
	}
	n := int64(len(r.Reconcile.Orders))
	exactly := slices.ContainsFunc(r.Checks, func(c orders.Check) bool { return c.Name == reconcileCheck && c.Violations == 0 })
	took := millis(int64(1000 * r.Reconcile.Took))
	if n == 0 {
		paragraph("reconcile", "on the replica: nothing left to cancel, in "+took)
	} else {
		paragraph("reconcile", fmt.Sprintf("on the replica: cancelled %d %s in %s%s", n, plural(n, "order"), took, map[bool]string{true: ", exactly those"}[exactly]))
	}
	const shown = 10
	for _, o := range r.Reconcile.Orders[:min(int(n), shown)] {
		for i, line := range wrap(fmt.Sprintf("order %s: %s: %s", orders.FormatID(o.ID), inWords(o.Missed), o.Because), s.Width-4) {
			fmt.Fprintln(b, map[bool]string{true: "  ", false: "    "}[i == 0]+line)
		}
	}
	if rest := n - shown; rest > 0 {
		fmt.Fprintf(b, "  and %d more; --json lists all\n", rest)
	}
}
