package reconcile

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Loop makes a run, with its audit, whenever the schedule's time has come, until ctx ends; then it returns nil, and a run under way is resumed by
// the next one. A time that was missed, because no process ran or a run failed, is caught up, once. Several loops may run: one of them works.
func (r *Reconciler) Loop(ctx context.Context) error {
	var failedFor time.Time // the instant of the schedule that is tried again
	for {
		due, err := r.schedule.last(r.now())
		if err != nil {
			return err
		}
		wait, err := r.serve(ctx, due)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil && !failedFor.Equal(due) {
			failedFor = due
			r.log.Warn("the run is tried again", "scheduled", due, "every", r.cfg.RetryAfter)
		}
		if wait == 0 {
			continue
		}
		if !r.waitFor(ctx, wait, due) {
			return nil
		}
	}
}

// serve sees to it that the run of an instant is made, and says how long to wait before looking again; a negative time: until the next instant.
func (r *Reconciler) serve(ctx context.Context, due time.Time) (time.Duration, error) {
	served, err := r.served(ctx, due)
	if err != nil {
		if ctx.Err() == nil {
			r.log.Error("reconcile failed", "err", err)
			r.metrics.runs.WithLabelValues(resultFailed).Inc()
		}
		return r.cfg.RetryAfter, err
	}
	if served {
		return -1, nil
	}
	report, err := r.Run(ctx, Options{Audit: true, scheduled: due})
	if errors.Is(err, ErrAudit) {
		err = nil // it is logged, and the night's orders are done
	}
	var other *RunningError
	switch {
	case errors.As(err, &other):
		r.log.Info("another reconcile is at work", "run", other.RunID, "owner", other.Owner)
		// It may die: then this one takes over when the lease has ended.
		return min(other.For+time.Second, r.cfg.RetryAfter), nil
	case err != nil:
		return r.cfg.RetryAfter, err
	case report.Resumed:
		return 0, nil // it looked at what was overdue back then
	}
	return -1, nil
}

// waitFor returns true when the time is over or the schedule has come to another instant, false when ctx has ended. It looks at the clock again
// and again instead of trusting one long timer: a machine sleeps, and clocks are set.
func (r *Reconciler) waitFor(ctx context.Context, wait time.Duration, due time.Time) bool {
	begun := time.Now()
	for {
		now := r.now()
		next, err := r.schedule.last(now)
		if err != nil || next.After(due) || wait > 0 && time.Since(begun) >= wait {
			return true
		}
		pause := r.poll
		if wait > 0 {
			pause = min(pause, wait)
		} else if next, err := r.schedule.after(now); err == nil {
			pause = min(pause, max(next.Sub(now), time.Millisecond))
		}
		if !sleep(ctx, pause) {
			return false
		}
	}
}

// Next is when the schedule's time comes next.
func (r *Reconciler) Next() (time.Time, error) { return r.schedule.after(r.now()) }

// Ready says whether the replica can be asked; nil also where there is none to be asked.
func (r *Reconciler) Ready(ctx context.Context) error {
	if r.replica == nil {
		return nil
	}
	s, err := pin(ctx, r.replica, r.cfg.ReadTimeout)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrReplica, err)
	}
	s.close()
	return nil
}
