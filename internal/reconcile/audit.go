package reconcile

import (
	"context"
	"fmt"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// auditMargin keeps an order out of the audit that came due at the very edge of what the run looked at, by clocks that differ.
const auditMargin = time.Minute

// checkAll audits the replica, once it shows that this run is done, and so all that the run did. On the primary there is no audit: it reads whole
// tables, and the snapshot that it holds open for as long makes every claim there slower.
func (u *run) checkAll(ctx context.Context) ([]orders.Check, error) {
	if u.source.primary {
		u.notAudited = "the primary was scanned, and the audit reads whole tables, which is for a replica"
		u.log.Warn("the audit is left out", "run", u.place.id, "why", u.notAudited)
		return nil, nil
	}
	if err := u.await(ctx, u.source, u.showsEnd); err != nil {
		return nil, fmt.Errorf("wait for the end of the run there: %w", err)
	}
	// The pool's other connections may lead to another replica, which was not asked for the marker.
	db := u.source.conn
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
	case !orders.IsUnavailable(err):
		return err
	}
	return fmt.Errorf("%w: %w", ErrReplica, err)
}
