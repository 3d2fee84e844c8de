package reconcile

import (
	"context"
	"fmt"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// auditMargin keeps an order out of the audit that came due at the very edge of what the run looked at, by clocks that differ.
const auditMargin = time.Minute

// checkAll audits the server that was scanned, once it shows all that this run has done: it reads whole tables, which is what a replica is for.
func (u *run) checkAll(ctx context.Context) ([]orders.Check, error) {
	db := u.replica
	if u.source.primary {
		db = u.primary.DB()
	} else {
		at, err := u.beat(ctx, u.place)
		if err != nil {
			return nil, err
		}
		if err := u.await(ctx, u.source, at); err != nil {
			return nil, fmt.Errorf("before the audit: %w", err)
		}
	}
	// Orders that came due later than the cut-off are the message path's, and may be on their way.
	grace := u.cfg.Grace + time.Since(u.begun) + auditMargin
	if u.place.resumed {
		grace += u.place.beat.Sub(u.place.cutoff)
	}
	checks, err := orders.Audit(ctx, db, orders.AuditOptions{Grace: grace})
	if err != nil {
		return nil, u.auditTrouble(ctx, err)
	}
	stale, err := orders.StaleOutbox(ctx, db, u.cfg.OutboxAge, 0)
	if err != nil {
		return nil, u.auditTrouble(ctx, err)
	}
	return append(checks, stale), nil
}

func (u *run) auditTrouble(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return cause(ctx, err)
	case u.source.primary || !orders.IsUnavailable(err):
		return err
	}
	return fmt.Errorf("%w: %w", ErrReplica, err)
}
