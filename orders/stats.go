package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

// Stats is what the metrics show of the database.
type Stats struct {
	// OutboxPending is the number of rows that still have to be sent.
	OutboxPending int64
	// OutboxOldest is how long the oldest pending row has been waiting to be sent, failed sends and leases included; 0 where none waits.
	OutboxOldest time.Duration
	// EventsPending and EventsOldest are the same of the outbox of events.
	EventsPending int64
	EventsOldest  time.Duration
	// Overdue is the number of unpaid orders past their deadline by more than a second and not held. Above zero for long means that
	// cancels are missed.
	Overdue int64
	// Parked is the number of parked rows that nobody has dealt with.
	Parked int64
	// HistoryList is the length of InnoDB's history list, -1 where the user lacks the PROCESS right. It grows while somebody keeps an
	// old snapshot open, and each claim of outbox rows becomes slower with it.
	HistoryList int64
}

// Stats reads the figures; each is one look at an index.
func (s *Store) Stats(ctx context.Context) (Stats, error) {
	st := Stats{HistoryList: -1}
	var oldest sql.NullInt64
	err := s.db.QueryRowContext(ctx, "SELECT COUNT(*), TIMESTAMPDIFF(MICROSECOND, MIN("+pendingSince+"), UTC_TIMESTAMP(3)) FROM outbox FORCE INDEX (outbox_to_do) WHERE state = 'pending'").
		Scan(&st.OutboxPending, &oldest)
	if err != nil {
		return Stats{}, fmt.Errorf("read outbox size: %w", err)
	}
	st.OutboxOldest = time.Duration(max(oldest.Int64, 0)) * time.Microsecond
	err = s.db.QueryRowContext(ctx, "SELECT COUNT(*), TIMESTAMPDIFF(MICROSECOND, MIN("+pendingSince+"), UTC_TIMESTAMP(3)) FROM event_outbox FORCE INDEX (event_outbox_to_do) WHERE state = 'pending'").
		Scan(&st.EventsPending, &oldest)
	if err != nil {
		return Stats{}, fmt.Errorf("read size of the outbox of events: %w", err)
	}
	st.EventsOldest = time.Duration(max(oldest.Int64, 0)) * time.Microsecond
	err = s.db.QueryRowContext(ctx, `SELECT COUNT(*) FROM orders FORCE INDEX (orders_by_deadline) WHERE status = 'unpaid'
		AND deadline_at < UTC_TIMESTAMP(3) - INTERVAL 1 SECOND AND (hold_until IS NULL OR hold_until < UTC_TIMESTAMP(3))`).Scan(&st.Overdue)
	if err != nil {
		return Stats{}, fmt.Errorf("count overdue orders: %w", err)
	}
	if err := s.db.QueryRowContext(ctx, "SELECT COUNT(*) FROM parked WHERE state = 'parked'").Scan(&st.Parked); err != nil {
		return Stats{}, fmt.Errorf("count parked rows: %w", err)
	}
	err = s.db.QueryRowContext(ctx, "SELECT count FROM information_schema.INNODB_METRICS WHERE name = 'trx_rseg_history_len'").Scan(&st.HistoryList)
	// 1227: no PROCESS right; a server without the row has no such counter.
	if err != nil && number(err) != 1227 && !errors.Is(err, sql.ErrNoRows) {
		return Stats{}, fmt.Errorf("read history list length: %w", err)
	}
	if err != nil {
		st.HistoryList = -1
	}
	return st, nil
}
