// Package reconcile finds, on a read replica, the unpaid orders that the message path missed, and has them cancelled on the primary.
//
// It is a second line of defence that shares nothing with the first but the conditional update: it knows no broker, and it trusts the replica
// with nothing but a hint. A lagging replica wastes a query; it cancels no paid order and hides no overdue one, since a run begins only
// when the replica shows a row that the run itself has written on the primary after it took its cut-off.
//
// A run holds a lease in its row of reconcile_runs, so that there is one at a time, and keeps its place there. What it cancelled is no longer
// found, so running it again, or from the start, is always right: the lease and the place save work and are never what makes the result right.
package reconcile
