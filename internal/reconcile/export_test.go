package reconcile

import "time"

// SetClock gives a reconciler another clock for its schedule, and how often it looks at it.
func (r *Reconciler) SetClock(now func() time.Time, poll time.Duration) { r.now, r.poll = now, poll }

// MaxParkedInRow is the number of orders in a row whose failure ends a run.
const MaxParkedInRow = maxParkedInRow
