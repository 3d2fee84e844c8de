package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Story is all that the database knows of one order, as it stood at one instant.
type Story struct {
	ID int64
	// Now is the database's clock at that instant.
	Now time.Time
	// ReadOnly says that the server takes no writes: it is a replica, and what it knows may be old.
	ReadOnly bool
	// Order is nil where there is none of that id. Its items are left out.
	Order *Order
	// Outbox is nil where the order has no row: it has no deadline, the row was purged, or somebody deleted it.
	Outbox *OutboxRow
	// Events are oldest first. Retention may have taken those of a final order.
	Events   []Event
	Payments []RecordedPayment
	Refunds  []RecordedRefund
	// Tasks are what the gateway still has to be told.
	Tasks []PendingTask
	// Parked are the order itself, its payments, and the messages with it that its events and its outbox row name; without bodies.
	Parked []ParkedRow
}

// RecordedPayment is a payment as it is stored.
type RecordedPayment struct {
	Gateway, TransactionID string
	Currency               string
	Amount                 int64      // minor units
	PaidAt                 *time.Time // as the gateway says; nil: it does not
	ReceivedAt             time.Time
	Outcome                PaymentOutcome
}

// RecordedRefund is a refund as it is stored.
type RecordedRefund struct {
	Gateway, TransactionID string // of the payment
	Currency               string
	Amount                 int64 // minor units
	Reason                 string
	State                  string // pending, done, given_up
	Attempts               int
	CreatedAt              time.Time
	AvailableAt            time.Time // pending: when it is tried next
	GatewayRefundID        string
	LastError              string
}

// PendingTask is a task for the gateway as it is stored.
type PendingTask struct {
	Kind        string // TaskClose
	Attempts    int
	CreatedAt   time.Time
	AvailableAt time.Time // when it is tried next
	LastError   string
}

// ReadStory reads the story of an order, or of an id without one: Order is then nil. It takes no locks and writes nothing, so any server that
// has the tables will do, and an account that may only read.
func (s *Store) ReadStory(ctx context.Context, id int64) (_ Story, err error) {
	failed := func(err error) (Story, error) { return Story{}, fmt.Errorf("read story of order %d: %w", id, err) }
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return failed(err)
	}
	defer func() { _ = tx.Rollback() }() // nothing was written
	story := Story{ID: id}
	switch o, err := readOrder(ctx, tx, id); {
	case err == nil:
		story.Order = &o
	case !errors.Is(err, ErrNotFound):
		return failed(err)
	}
	// After the first read, which took the snapshot: nothing in the story is later than this.
	var now instant
	var readOnly string // a number, or a word in MariaDB 12
	if err := tx.QueryRowContext(ctx, "SELECT CAST(UTC_TIMESTAMP(3) AS CHAR), @@global.read_only").Scan(&now, &readOnly); err != nil {
		return failed(err)
	}
	story.Now, story.ReadOnly = now.time, readOnly != "0" && readOnly != "OFF"
	if row, there, err := readOutbox(ctx, tx, id); err != nil {
		return failed(err)
	} else if there {
		story.Outbox = &row
	}
	if story.Events, err = readEvents(ctx, tx, id); err != nil {
		return failed(err)
	}
	if story.Payments, err = readPayments(ctx, tx, id); err != nil {
		return failed(err)
	}
	if story.Refunds, err = readRefunds(ctx, tx, id); err != nil {
		return failed(err)
	}
	if story.Tasks, err = readTasks(ctx, tx, id); err != nil {
		return failed(err)
	}
	if story.Parked, err = readParkedOf(ctx, tx, story); err != nil {
		return failed(err)
	}
	return story, nil
}

func readPayments(ctx context.Context, db executor, id int64) (list []RecordedPayment, err error) {
	err = each(ctx, db, `SELECT gateway, transaction_id, currency, amount, CAST(paid_at AS CHAR), CAST(received_at AS CHAR), outcome
		FROM payments FORCE INDEX (payments_by_order) WHERE order_id = ? ORDER BY received_at, gateway, transaction_id`, []any{id},
		func(rows *sql.Rows) error {
			var p RecordedPayment
			var paid, received instant
			if err := rows.Scan(&p.Gateway, &p.TransactionID, &p.Currency, &p.Amount, &paid, &received, &p.Outcome); err != nil {
				return err
			}
			p.PaidAt, p.ReceivedAt = paid.pointer(), received.time
			list = append(list, p)
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read payments: %w", err)
	}
	return list, nil
}

func readRefunds(ctx context.Context, db executor, id int64) (list []RecordedRefund, err error) {
	err = each(ctx, db, `SELECT gateway, transaction_id, currency, amount, reason, state, attempts, CAST(created_at AS CHAR), CAST(available_at AS CHAR),
		COALESCE(gateway_refund_id, ''), COALESCE(last_error, '') FROM refunds FORCE INDEX (refunds_by_order) WHERE order_id = ? ORDER BY created_at, gateway, transaction_id`, []any{id},
		func(rows *sql.Rows) error {
			var r RecordedRefund
			var created, available instant
			if err := rows.Scan(&r.Gateway, &r.TransactionID, &r.Currency, &r.Amount, &r.Reason, &r.State, &r.Attempts, &created, &available, &r.GatewayRefundID, &r.LastError); err != nil {
				return err
			}
			r.CreatedAt, r.AvailableAt = created.time, available.time
			list = append(list, r)
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read refunds: %w", err)
	}
	return list, nil
}

func readTasks(ctx context.Context, db executor, id int64) (list []PendingTask, err error) {
	err = each(ctx, db, `SELECT kind, attempts, CAST(created_at AS CHAR), CAST(available_at AS CHAR), COALESCE(last_error, '') FROM gateway_tasks WHERE order_id = ? ORDER BY kind`, []any{id},
		func(rows *sql.Rows) error {
			var task PendingTask
			var created, available instant
			if err := rows.Scan(&task.Kind, &task.Attempts, &created, &available, &task.LastError); err != nil {
				return err
			}
			task.CreatedAt, task.AvailableAt = created.time, available.time
			list = append(list, task)
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read tasks for the gateway: %w", err)
	}
	return list, nil
}

// readParkedOf reads what is parked of the order in a story that has everything else.
func readParkedOf(ctx context.Context, db executor, s Story) (list []ParkedRow, err error) {
	refs := map[string][]string{ParkedOrder: {FormatID(s.ID)}}
	for _, p := range s.Payments {
		refs[ParkedPayment] = append(refs[ParkedPayment], clip(p.Gateway+":"+p.TransactionID, maxRef))
	}
	if s.Outbox != nil && s.Outbox.MessageID != "" {
		refs[ParkedMessage] = append(refs[ParkedMessage], s.Outbox.MessageID)
	}
	for _, e := range s.Events {
		if id := e.Text("message_id"); e.Kind == EventParked && id != "" {
			refs[ParkedMessage] = append(refs[ParkedMessage], id)
		}
		if id := e.Text("event_id"); e.Kind == EventParked && id != "" {
			refs[ParkedMessage] = append(refs[ParkedMessage], parkedEvent+id)
		}
	}
	for _, what := range []string{ParkedOrder, ParkedMessage, ParkedPayment} {
		slices.Sort(refs[what])
		for part := range slices.Chunk(slices.Compact(refs[what]), maxRows) {
			err := each(ctx, db, "SELECT "+parkedColumns+" FROM parked FORCE INDEX (parked_by_ref) WHERE what = ? AND ref IN ("+marks(len(part))+") ORDER BY id", append([]any{what}, anys(part)...),
				func(rows *sql.Rows) error {
					p, err := scanParked(rows.Scan)
					list = append(list, p)
					return err
				})
			if err != nil {
				return nil, fmt.Errorf("read what is parked: %w", err)
			}
		}
	}
	return list, nil
}
