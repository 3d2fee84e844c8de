// Every move of stock has a row in stock_ledger whose primary key is (order, SKU, kind): the row makes the move happen once. The
// sums in stock follow in the same transaction, last of all, since a popular SKU's row is what concurrent orders wait for.

package orders

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"gorm.io/gorm"
)

// Kinds of moves in the ledger.
const (
	moveReserve = "reserve"
	moveRelease = "release"
	moveSell    = "sell"
	moveAdjust  = "adjust"
)

type move struct {
	orderID  int64
	sku      string
	kind     string
	quantity int64
}

func (t *txn) addMoves(ctx context.Context, moves []move) error {
	for len(moves) > 0 {
		some := moves[:min(len(moves), maxRows)]
		moves = moves[len(some):]
		args := make([]any, 0, 5*len(some))
		for _, m := range some {
			args = append(args, m.orderID, m.sku, m.kind, m.quantity, at(t.now))
		}
		if _, err := t.exec(ctx, "INSERT INTO stock_ledger (order_id, sku, kind, quantity, at) VALUES "+tuples(len(some), 5), args...); err != nil {
			return fmt.Errorf("write stock ledger: %w", err)
		}
	}
	return nil
}

// reserve takes an order's items out of what is available. The items are sorted by SKU.
func (t *txn) reserve(ctx context.Context, items []Item) error {
	for _, it := range items {
		n, err := t.exec(ctx, `UPDATE stock SET available = available - ?, reserved = reserved + ?
			WHERE sku = ? AND (available IS NULL OR available >= ?)`, it.Quantity, it.Quantity, it.SKU, it.Quantity)
		if err != nil {
			return fmt.Errorf("reserve %d of %q: %w", it.Quantity, it.SKU, err)
		}
		if n == 1 {
			continue
		}
		var available sql.NullInt64
		err = t.QueryRowContext(ctx, "SELECT available FROM stock WHERE sku = ? FOR UPDATE", it.SKU).Scan(&available)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return &StockError{SKU: it.SKU, Wanted: it.Quantity, unknown: true}
		case err != nil:
			return fmt.Errorf("read stock of %q: %w", it.SKU, err)
		case !available.Valid || available.Int64 >= it.Quantity:
			return fmt.Errorf("stock of %q: %w", it.SKU, errAgain)
		}
		return &StockError{SKU: it.SKU, Wanted: it.Quantity, Available: available.Int64}
	}
	return nil
}

// unsettled gives what the orders reserved and neither released nor sold yet. The orders' rows are locked by the caller, so nobody
// else adds moves of theirs, and the read needs no locks of its own: at REPEATABLE READ they would cover the gaps between orders, where
// other orders' moves are written. But at that level a caller's snapshot can be older than an order, which then seems to have no moves.
// An order's reservations commit with it, all or none, so only those that show none are read again, with a lock.
func (t *txn) unsettled(ctx context.Context, ids []int64) ([]move, error) {
	open, seen, err := t.readMoves(ctx, ids, "")
	if err != nil {
		return nil, err
	}
	unseen := slices.DeleteFunc(slices.Clone(ids), func(id int64) bool { return seen[id] })
	more, _, err := t.readMoves(ctx, unseen, " FOR UPDATE")
	return append(open, more...), err
}

// readMoves gives the open reservations of orders, and which of the orders have any moves.
func (t *txn) readMoves(ctx context.Context, ids []int64, lock string) (open []move, seen map[int64]bool, err error) {
	seen = map[int64]bool{}
	for part := range slices.Chunk(ids, maxRows) {
		var orderID int64
		var sku string
		reserved, settled := -1, false // of the present order and SKU: its index in open, and whether it was released or sold
		err := t.each(ctx, `SELECT order_id, sku, kind, quantity FROM stock_ledger FORCE INDEX (PRIMARY)
			WHERE order_id IN (`+marks(len(part))+`) AND kind <> 'adjust' ORDER BY order_id, sku, kind`+lock, anys(part),
			func(rows *sql.Rows) error {
				var m move
				if err := rows.Scan(&m.orderID, &m.sku, &m.kind, &m.quantity); err != nil {
					return err
				}
				seen[m.orderID] = true
				if m.orderID != orderID || m.sku != sku {
					orderID, sku, reserved, settled = m.orderID, m.sku, -1, false
				}
				switch {
				case m.kind != moveReserve:
					settled = true
					if reserved >= 0 {
						open, reserved = open[:reserved], -1
					}
				case !settled:
					reserved = len(open)
					open = append(open, m)
				}
				return nil
			})
		if err != nil {
			return nil, nil, fmt.Errorf("read stock ledger: %w", err)
		}
	}
	return open, seen, nil
}

// settle ends the reservations of orders that are locked: kind release gives the stock back, kind sell takes it for good. The ledger
// rows are written here, the sums by the returned function, which the caller runs last and once.
func (t *txn) settle(ctx context.Context, ids []int64, kind string) (sums func() error, err error) {
	open, err := t.unsettled(ctx, ids)
	if err != nil {
		return nil, err
	}
	bySKU := map[string]int64{}
	for i := range open {
		open[i].kind = kind
		bySKU[open[i].sku] += open[i].quantity
	}
	if err := t.addMoves(ctx, open); err != nil {
		return nil, err
	}
	return func() error { return t.settleSums(ctx, open, bySKU, kind) }, nil
}

// settleSums brings the stock rows in line with the moves. A row that is gone, or that was made anew and does not hold what the orders
// reserved, is reported and left alone: an order ends whatever became of its products.
func (t *txn) settleSums(ctx context.Context, moves []move, bySKU map[string]int64, kind string) error {
	lost := map[string]bool{}
	for part := range slices.Chunk(slices.Sorted(maps.Keys(bySKU)), maxRows) {
		n, err := t.moveSums(ctx, part, bySKU, kind)
		if err == nil && n == int64(len(part)) {
			continue
		}
		if number(err) == errSafeUpdates {
			if err := t.moveSumsOneByOne(ctx, part, bySKU, kind, lost); err != nil {
				return err
			}
			continue
		}
		short := isCheck(err) // reserved would fall below zero, and nothing was changed
		if err != nil && !short {
			return err
		}
		reserved := make(map[string]int64, len(part))
		err = t.each(ctx, "SELECT sku, reserved FROM stock FORCE INDEX (PRIMARY) WHERE sku IN ("+marks(len(part))+") ORDER BY sku FOR UPDATE", anys(part),
			func(rows *sql.Rows) error {
				var sku string
				var n int64
				err := rows.Scan(&sku, &n)
				reserved[sku] = n
				return err
			})
		if err != nil {
			return fmt.Errorf("read which of %d SKUs are gone: %w", len(part), err)
		}
		fit := slices.DeleteFunc(slices.Clone(part), func(sku string) bool {
			n, there := reserved[sku]
			lost[sku] = !there || short && n < bySKU[sku]
			return lost[sku]
		})
		if short && len(fit) > 0 {
			if _, err := t.moveSums(ctx, fit, bySKU, kind); err != nil {
				return err
			}
		}
	}
	return t.reportLost(ctx, moves, lost)
}

// moveSums changes the sums of SKUs, which are sorted, and gives the number of rows that were there to change.
func (t *txn) moveSums(ctx context.Context, skus []string, bySKU map[string]int64, kind string) (int64, error) {
	set := "s.available = s.available + m.quantity, s.reserved = s.reserved - m.quantity"
	if kind == moveSell {
		set = "s.reserved = s.reserved - m.quantity, s.sold = s.sold + m.quantity"
	}
	// The sums are joined in as a list in SKU order, and the join is told to follow that order: rows are locked by SKU. An IN list would
	// be planned as a scan of the whole table once it names more than about half of the SKUs.
	values := "SELECT CONVERT(? USING utf8mb4) COLLATE utf8mb4_bin AS sku, CAST(? AS SIGNED) AS quantity"
	args := make([]any, 0, 2*len(skus))
	for i, sku := range skus {
		if i > 0 {
			values += " UNION ALL SELECT ?, ?"
		}
		args = append(args, sku, bySKU[sku])
	}
	n, err := t.exec(ctx, "UPDATE ("+values+") m STRAIGHT_JOIN stock s FORCE INDEX (PRIMARY) ON s.sku = m.sku SET "+set, args...)
	if err != nil {
		return 0, fmt.Errorf("%s stock of %d SKUs: %w", kind, len(skus), err)
	}
	return n, nil
}

// moveSumsOneByOne does the same in callers' sessions with sql_safe_updates, which refuse the joined list since it is read from end to
// end. It notes the SKUs whose rows could not be changed.
func (t *txn) moveSumsOneByOne(ctx context.Context, skus []string, bySKU map[string]int64, kind string, lost map[string]bool) error {
	query := "UPDATE stock SET available = available + ?, reserved = reserved - ? WHERE sku = ?"
	if kind == moveSell {
		query = "UPDATE stock SET sold = sold + ?, reserved = reserved - ? WHERE sku = ?"
	}
	for _, sku := range skus {
		n, err := t.exec(ctx, query, bySKU[sku], bySKU[sku], sku)
		if err != nil && !isCheck(err) {
			return fmt.Errorf("%s stock of %q: %w", kind, sku, err)
		}
		lost[sku] = n == 0
	}
	return nil
}

// reportLost tells of stock rows that could not take back, or give out, what an order held of them.
func (t *txn) reportLost(ctx context.Context, moves []move, lost map[string]bool) error {
	var events []Event
	skus := map[string]bool{}
	for _, m := range moves {
		if !lost[m.sku] {
			continue
		}
		skus[m.sku] = true
		e, err := event(m.orderID, EventStockMissing, ActorLapse, map[string]any{"sku": m.sku, "quantity": m.quantity, "move": m.kind})
		if err != nil {
			return err
		}
		events = append(events, e)
	}
	t.gone += int64(len(skus))
	return t.addEvents(ctx, events)
}

// Stock is the state of one SKU. Available is nil where the stock is unlimited.
type Stock struct {
	SKU       string
	Available *int64
	Reserved  int64
	Sold      int64
}

// AdjustStock adds delta pieces (negative: takes away) to what is available, and makes the SKU known if it is not. ref, a positive id
// of the caller's choice ([NewID] will do), makes it happen once: a repeated ref for the same SKU changes nothing. Unlimited stock
// stays unlimited. Taking away more than is available is a [StockError].
func (s *Store) AdjustStock(ctx context.Context, ref int64, sku string, delta int64) error {
	return s.inTx(ctx, "adjust stock", adjust(ref, sku, delta))
}

// AdjustStockTx is AdjustStock in the caller's transaction.
func (s *Store) AdjustStockTx(ctx context.Context, tx *gorm.DB, ref int64, sku string, delta int64) error {
	return s.joinTx(ctx, tx, "adjust stock", adjust(ref, sku, delta))
}

func adjust(ref int64, sku string, delta int64) func(context.Context, *txn) error {
	return func(ctx context.Context, t *txn) error {
		if err := checkName("sku", sku, true); err != nil {
			return err
		}
		if ref <= 0 {
			return invalid("reference %d of the adjustment of %q is not positive", ref, sku)
		}
		if delta == math.MinInt64 {
			return invalid("adjustment %d of %q is out of range", delta, sku)
		}
		// The ledger row comes first, by itself: its primary key is what makes the adjustment happen once, and looking for it before would
		// lock, at REPEATABLE READ, the gap where it will be.
		err := t.addMoves(ctx, []move{{orderID: ref, sku: sku, kind: moveAdjust, quantity: delta}})
		switch {
		case number(err) == errDuplicateKey:
			return nil
		case err != nil:
			return err
		}
		if delta >= 0 {
			// Not VALUES(available): deprecated in MySQL, and its successor is unknown to MariaDB.
			_, err = t.exec(ctx, `INSERT INTO stock (sku, available, reserved, sold) VALUES (?, ?, 0, 0)
				ON DUPLICATE KEY UPDATE available = available + ?`, sku, delta, delta)
			if err != nil {
				return fmt.Errorf("adjust stock of %q by %d: %w", sku, delta, err)
			}
			return nil
		}
		n, err := t.exec(ctx, "UPDATE stock SET available = available + ? WHERE sku = ? AND available >= ?", delta, sku, -delta)
		if err != nil {
			return fmt.Errorf("adjust stock of %q by %d: %w", sku, delta, err)
		}
		if n == 1 {
			return nil
		}
		var available sql.NullInt64
		err = t.QueryRowContext(ctx, "SELECT available FROM stock WHERE sku = ? FOR UPDATE", sku).Scan(&available)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return &StockError{SKU: sku, Wanted: -delta, unknown: true}
		case err != nil:
			return fmt.Errorf("read stock of %q: %w", sku, err)
		case !available.Valid:
			return nil
		}
		return &StockError{SKU: sku, Wanted: -delta, Available: available.Int64}
	}
}

// SetUnlimited makes a SKU's stock unlimited, and the SKU known if it is not. Reserved and sold go on counting.
func (s *Store) SetUnlimited(ctx context.Context, sku string) error {
	if err := checkName("sku", sku, true); err != nil {
		return err
	}
	_, err := s.db.ExecContext(ctx, "INSERT INTO stock (sku, available, reserved, sold) VALUES (?, NULL, 0, 0) ON DUPLICATE KEY UPDATE available = NULL", sku)
	if err != nil {
		return fmt.Errorf("make stock of %q unlimited: %w", sku, err)
	}
	return nil
}

// GetStock reads the state of one SKU; [ErrUnknownSKU] when there is none.
func (s *Store) GetStock(ctx context.Context, sku string) (Stock, error) {
	st := Stock{SKU: sku}
	var available sql.NullInt64
	err := s.db.QueryRowContext(ctx, "SELECT available, reserved, sold FROM stock WHERE sku = ?", sku).Scan(&available, &st.Reserved, &st.Sold)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return Stock{}, fmt.Errorf("read stock of %q: %w", sku, ErrUnknownSKU)
	case err != nil:
		return Stock{}, fmt.Errorf("read stock of %q: %w", sku, err)
	}
	if available.Valid {
		st.Available = &available.Int64
	}
	return st, nil
}
