package orders_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	gormmysql "gorm.io/driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/lapse-orders/lapse/orders"
)

// shop opens a handle as a shop would, with its own settings, on the test's database.
func (b *bundle) shop(config *gorm.Config, change ...func(*mysql.Config)) *gorm.DB {
	b.t.Helper()
	parsed, err := mysql.ParseDSN(b.db.DSN)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, c := range change {
		c(parsed)
	}
	config.Logger = logger.Discard
	db, err := gorm.Open(gormmysql.Open(parsed.FormatDSN()), config)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		pool, err := db.DB()
		if err != nil {
			b.t.Error(err)
			return
		}
		_ = pool.Close()
	})
	return db.WithContext(b.ctx)
}

func param(name, value string) func(*mysql.Config) {
	return func(c *mysql.Config) {
		if c.Params == nil {
			c.Params = map[string]string{}
		}
		c.Params[name] = value
	}
}

// dump is every row about an order, column by column, without the generated ids.
func (b *bundle) dump(id int64) string {
	b.t.Helper()
	var out strings.Builder
	for _, q := range []string{
		"SELECT * FROM orders WHERE id = ?", "SELECT * FROM order_items WHERE order_id = ? ORDER BY sku", "SELECT * FROM stock_ledger WHERE order_id = ? ORDER BY sku, kind",
		"SELECT * FROM payments WHERE order_id = ? ORDER BY transaction_id", "SELECT * FROM refunds WHERE order_id = ? ORDER BY transaction_id", "SELECT * FROM outbox WHERE order_id = ?",
		"SELECT at, kind, actor, CAST(detail AS CHAR) AS detail FROM order_events WHERE order_id = ? ORDER BY id",
	} {
		b.dumpRows(&out, q, id)
	}
	return out.String()
}

func (b *bundle) dumpRows(out *strings.Builder, query string, id int64) {
	b.t.Helper()
	rows, err := b.db.SQL.QueryContext(b.ctx, query, id)
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	columns, err := rows.Columns()
	if err != nil {
		b.t.Fatal(err)
	}
	for rows.Next() {
		values := make([]sql.NullString, len(columns))
		scan := make([]any, len(columns))
		for i := range values {
			scan[i] = &values[i]
		}
		if err := rows.Scan(scan...); err != nil {
			b.t.Fatal(err)
		}
		for i, v := range values {
			if v.Valid {
				fmt.Fprintf(out, "%s=%s ", columns[i], strings.ReplaceAll(v.String, fmt.Sprint(id), "<id>"))
			}
		}
		out.WriteString("\n")
	}
	if err := rows.Err(); err != nil {
		b.t.Fatal(err)
	}
}

// sessions are the settings that a shop's handle can have. What lapse decides and stores must not depend on any of them.
var sessions = []struct {
	name   string
	config gorm.Config
	change func(*mysql.Config)
}{
	{"plain", gorm.Config{}, func(*mysql.Config) {}},
	{"eight hours east", gorm.Config{}, func(c *mysql.Config) {
		c.ParseTime = true
		c.Loc = time.FixedZone("Asia/Shanghai", 8*3600)
		param("time_zone", "'+08:00'")(c)
	}},
	{"eight hours east, times as text", gorm.Config{}, func(c *mysql.Config) {
		c.Loc = time.FixedZone("Asia/Shanghai", 8*3600)
		param("time_zone", "'+08:00'")(c)
	}},
	{"times parsed", gorm.Config{}, func(c *mysql.Config) { c.ParseTime = true }},
	{"found rows", gorm.Config{}, func(c *mysql.Config) { c.ClientFoundRows = true }},
	{"not strict", gorm.Config{}, param("sql_mode", "''")},
	{"ansi and padded", gorm.Config{}, param("sql_mode", "'ANSI,NO_BACKSLASH_ESCAPES'")},
	{"safe updates", gorm.Config{}, param("sql_safe_updates", "1")},
	{"another collation, compressed", gorm.Config{}, func(c *mysql.Config) {
		c.Collation = "utf8mb4_general_ci"
		if err := c.Apply(mysql.EnableCompression(true)); err != nil {
			panic(err)
		}
	}},
	{"interpolated", gorm.Config{}, func(c *mysql.Config) { c.InterpolateParams = true }},
	{"interpolated without backslashes", gorm.Config{}, func(c *mysql.Config) {
		c.InterpolateParams = true
		param("sql_mode", "'NO_BACKSLASH_ESCAPES'")(c)
	}},
	{"prepared statements", gorm.Config{PrepareStmt: true}, func(*mysql.Config) {}},
	{"translated errors", gorm.Config{TranslateError: true, SkipDefaultTransaction: true, AllowGlobalUpdate: true, QueryFields: true, CreateBatchSize: 1}, func(*mysql.Config) {}},
	{"prepared, east, found rows, not strict", gorm.Config{PrepareStmt: true, TranslateError: true}, func(c *mysql.Config) {
		c.ParseTime, c.ClientFoundRows, c.Loc = true, true, time.FixedZone("Asia/Shanghai", 8*3600)
		param("time_zone", "'+08:00'")(c)
		param("sql_mode", "''")(c)
	}},
}

// story runs every verb on orders first … first+3 and gives the answers. own: each in a transaction of its own.
func story(ctx context.Context, s *orders.Store, db *gorm.DB, isolation sql.IsolationLevel, first int64) (answers []string) {
	add := func(what any, err error) {
		text := fmt.Sprintf("%+v", what)
		if o, ok := what.(orders.Order); ok {
			text = string(o.Status)
			if o.DeadlineAt != nil {
				text += " " + o.DeadlineAt.Format(time.RFC3339Nano)
			}
		}
		answers = append(answers, answerOf(text, err))
	}
	in := func(do func(tx *gorm.DB) error) {
		err := db.Transaction(func(tx *gorm.DB) error { return do(tx) }, &sql.TxOptions{Isolation: isolation})
		if err != nil && !slices.Contains(answers, answerOf("", err)) {
			answers = append(answers, "transaction: "+err.Error())
		}
	}
	order := func(i int64) orders.NewOrder {
		sku := func(n int) string { return fmt.Sprintf("%s-%d", strings.Repeat("茶", n), first) }
		return orders.NewOrder{ID: first + i, Channel: "we'b\\", UserID: "ü\"1", Currency: "EUR", Amount: 1000, Timeout: 20 * time.Minute,
			Items: []orders.Item{{SKU: sku(20), Quantity: 2, Price: 1}, {SKU: sku(1), Quantity: 1, Price: 2}, {SKU: sku(20), Quantity: 1, Price: 1}}}
	}
	in(func(tx *gorm.DB) error {
		for _, it := range order(0).Items[:2] {
			for range 2 { // the second changes nothing
				add("adjusted", s.AdjustStockTx(ctx, tx, first, it.SKU, 12))
			}
		}
		return nil
	})
	in(func(tx *gorm.DB) error {
		for i := range int64(4) {
			o, err := s.PlaceTx(ctx, tx, order(i))
			add(o, err)
		}
		o, err := s.PlaceTx(ctx, tx, order(3))
		add(o, err)
		return nil
	})
	pay := func(tx *gorm.DB, i int64, transaction string, amount int64) {
		p := notice(first+i, transaction, amount, "EUR")
		p.PaidAt = noon.In(time.FixedZone("CST", 8*3600)).Add(-time.Minute)
		r, err := s.RecordPaymentTx(ctx, tx, p)
		add(r, err)
	}
	in(func(tx *gorm.DB) error {
		pay(tx, 0, "a", 1500)
		pay(tx, 0, "a", 1500)
		pay(tx, 0, "b", 1000)
		pay(tx, 0, "a", 1)
		return nil
	})
	in(func(tx *gorm.DB) error {
		for range 2 {
			out, err := s.CancelTx(ctx, tx, first+1, "u1", "changed 'my' mind \\ \x60")
			out.ID = ""
			add(out, err)
		}
		pay(tx, 1, "c", 1000)
		x, err := s.ExtendDeadlineTx(ctx, tx, first+2, noon.Add(time.Hour).In(time.FixedZone("CST", 8*3600)), "support")
		add(x, err)
		pay(tx, 3, "d", 999)
		return nil
	})
	return answers
}

func TestJoiningATransactionDoesTheSameInEverySession(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b = b.on(b.at(noon, orders.Config{}))
	var wantAnswers []string
	var wantRows string
	first := int64(1_000_000)
	for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		for i, session := range sessions {
			if isolation != sql.LevelRepeatableRead && i != 0 && i != len(sessions)-1 {
				continue // the level and the settings do not meddle with each other; the usual level gets them all
			}
			name := fmt.Sprintf("%s, %s", session.name, isolation)
			first += 1_000_000
			config := session.config
			db := b.shop(&config, session.change, param("timestamp", stopped(noon)))
			answers := story(b.ctx, b.store, db, isolation, first)
			var rows strings.Builder
			for i := range int64(4) {
				rows.WriteString(strings.ReplaceAll(b.dump(first+i), fmt.Sprint(first), "<first>"))
			}
			if wantAnswers == nil {
				wantAnswers, wantRows = answers, rows.String()
				t.Log(strings.Join(answers, "\n"))
				t.Log(wantRows)
			}
			if !slices.Equal(answers, wantAnswers) {
				t.Errorf("%s: answers\n %s\nwant\n %s", name, strings.Join(answers, "\n "), strings.Join(wantAnswers, "\n "))
			}
			if rows.String() != wantRows {
				t.Errorf("%s: rows\n%s\nwant\n%s", name, rows.String(), wantRows)
			}
			for _, sku := range []string{strings.Repeat("茶", 20), "茶"} {
				b.wantSums(fmt.Sprintf("%s-%d", sku, first), 12)
			}
		}
	}
	// What the first session stored is right, not only the same everywhere.
	for _, want := range []string{"deadline_at=2027-01-15 12:20:00.123", "deadline_at=2027-01-15 13:00:00.123", "created_at=2027-01-15 12:00:00.123",
		"paid_at=2027-01-15 12:00:00.123", "paid_at=2027-01-15 11:59:00.123", "cancelled_at=2027-01-15 12:00:00.123", "user_id=ü\"1", `channel=we'b\`,
		"cancel_reason=changed 'my' mind \\ \x60"} {
		if !strings.Contains(wantRows, want+" ") {
			t.Errorf("no %q in\n%s", want, wantRows)
		}
	}
	b.wantClean()
}

// wantSums fails unless the SKU's pieces add up to n.
func (b *bundle) wantSums(sku string, n int64) {
	b.t.Helper()
	st, err := b.store.GetStock(b.ctx, sku)
	if err != nil || st.Available == nil || *st.Available+st.Reserved+st.Sold != n || st.Sold == 0 {
		b.t.Errorf("stock of %s is %s (%v), want %d in all and some sold", sku, describe(st), err, n)
	}
}

func (b *bundle) shopTable() {
	b.t.Helper()
	b.db.Exec(b.t, "CREATE TABLE shop_rows (n INT PRIMARY KEY)")
}

var lapseTables = []string{"orders", "order_items", "stock_ledger", "payments", "refunds", "outbox", "event_outbox", "order_events", "parked"}

// counts gives the number of rows of every table of ours.
func (b *bundle) counts() string {
	b.t.Helper()
	var list []string
	for _, table := range lapseTables {
		list = append(list, fmt.Sprintf("%s %d", table, b.db.Int(b.t, "SELECT COUNT(*) FROM "+table)))
	}
	return strings.Join(list, ", ") + ", stock " + b.db.Text(b.t, "SELECT GROUP_CONCAT(CONCAT_WS('+', sku, available, reserved, sold) ORDER BY sku) FROM stock")
}

func TestErrorInACallersTransactionLeavesNothingOfOursBehind(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.shopTable()
	b.stock("tea", 100)
	b.stock("zen", 1)
	paid := b.place().ID
	b.pay(paid)
	tea := orders.Item{SKU: "tea", Quantity: 1, Price: 1}
	// The order's rows are written and the first SKU is taken before the second turns out to be short.
	verbs := map[string]func(tx *gorm.DB) error{
		"out of stock": func(tx *gorm.DB) error {
			_, err := b.store.PlaceTx(b.ctx, tx, orders.NewOrder{Currency: "EUR", Items: []orders.Item{tea, {SKU: "zen", Quantity: 2, Price: 1}}})
			return err
		},
		"unknown SKU": func(tx *gorm.DB) error {
			_, err := b.store.PlaceTx(b.ctx, tx, orders.NewOrder{Currency: "EUR", Items: []orders.Item{tea, {SKU: "zoo", Quantity: 2, Price: 1}}})
			return err
		},
		"order exists": func(tx *gorm.DB) error {
			_, err := b.store.PlaceTx(b.ctx, tx, orders.NewOrder{ID: paid, Currency: "EUR", Items: []orders.Item{tea}})
			return err
		},
		"conflicting notice": func(tx *gorm.DB) error {
			p := payment(paid)
			p.Amount++
			_, err := b.store.RecordPaymentTx(b.ctx, tx, p)
			return err
		},
		"unknown order": func(tx *gorm.DB) error {
			_, err := b.store.RecordPaymentTx(b.ctx, tx, payment(1))
			return err
		},
		"invalid": func(tx *gorm.DB) error {
			_, err := b.store.ExtendDeadlineTx(b.ctx, tx, b.place().ID, time.Now(), "support")
			return err
		},
		"adjustment below zero": func(tx *gorm.DB) error { return b.store.AdjustStockTx(b.ctx, tx, orders.NewID(), "tea", -1000) },
		"a name too long": func(tx *gorm.DB) error {
			_, err := b.store.CancelTx(b.ctx, tx, paid, strings.Repeat("x", 65), "why not")
			return err
		},
	}
	n := 0
	for _, config := range []gorm.Config{{}, {PrepareStmt: true}} {
		db := b.shop(&config)
		for name, verb := range verbs {
			n += 2
			var before string
			err := db.Transaction(func(tx *gorm.DB) error {
				if err := tx.Exec("INSERT INTO shop_rows VALUES (?)", n).Error; err != nil {
					return err
				}
				if name == "invalid" { // places an order of its own first
					return verb(tx)
				}
				before = b.counts()
				if err := verb(tx); err == nil || orders.IsRetryable(err) || orders.IsUnavailable(err) {
					t.Errorf("%s: %v", name, err)
				}
				return tx.Exec("INSERT INTO shop_rows VALUES (?)", n+1).Error
			})
			if name == "invalid" {
				if !errors.Is(err, orders.ErrInvalid) {
					t.Errorf("%s: %v", name, err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s: the caller's transaction did not survive: %v", name, err)
			}
			if after := b.counts(); after != before {
				t.Errorf("%s left something behind\n %s\n %s", name, before, after)
			}
			if got := b.db.Int(t, "SELECT COUNT(*) FROM shop_rows WHERE n IN (?, ?)", n, n+1); got != 2 {
				t.Errorf("%s: %d of the caller's 2 rows are there", name, got)
			}
		}
	}
	b.wantClean()
}

// case PRD-1
func TestOrderOfARolledBackTransactionSendsNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 10)
	before := b.counts()
	failed := errors.New("the shop changed its mind")
	err := b.shop(&gorm.Config{}).Transaction(func(tx *gorm.DB) error {
		o, err := b.store.PlaceTx(b.ctx, tx, orders.NewOrder{Currency: "EUR", Items: []orders.Item{{SKU: "tea", Quantity: 1, Price: 1}}})
		if err != nil || o.ID == 0 {
			t.Errorf("%+v, %v", o, err)
		}
		return failed
	})
	if !errors.Is(err, failed) {
		t.Fatal(err)
	}
	if after := b.counts(); after != before {
		t.Errorf("%s, before %s", after, before)
	}
	if claim, err := b.store.ClaimOutbox(b.ctx, 10, time.Minute); err != nil || len(claim.Rows) != 0 {
		t.Errorf("%+v, %v", claim, err)
	}
}

func TestHandleOutsideATransactionIsRefused(t *testing.T) {
	t.Parallel()
	b := setup(t)
	o := b.place()
	before := b.counts()
	for _, config := range []gorm.Config{{}, {PrepareStmt: true}} {
		db := b.shop(&config)
		finished := db.Begin()
		if err := finished.Rollback().Error; err != nil {
			t.Fatal(err)
		}
		var connected *gorm.DB
		if err := db.Connection(func(tx *gorm.DB) error {
			connected = tx
			_, err := b.store.PlaceTx(b.ctx, connected, orders.NewOrder{Currency: "EUR"})
			if !errors.Is(err, orders.ErrNoTransaction) {
				t.Errorf("a pinned connection: %v", err)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		for name, handle := range map[string]*gorm.DB{"nil": nil, "zero": {}, "pool": db, "session": db.Session(&gorm.Session{NewDB: true}), "finished": finished} {
			for verb, err := range map[string]error{
				"place": func() error {
					_, err := b.store.PlaceTx(b.ctx, handle, orders.NewOrder{Currency: "EUR"})
					return err
				}(),
				"pay": func() error {
					_, err := b.store.RecordPaymentTx(b.ctx, handle, payment(o.ID))
					return err
				}(),
				"cancel": func() error {
					_, err := b.store.CancelTx(b.ctx, handle, o.ID, "u1", "why not")
					return err
				}(),
				"extend": func() error {
					_, err := b.store.ExtendDeadlineTx(b.ctx, handle, o.ID, time.Now().Add(2*time.Hour), "u1")
					return err
				}(),
				"adjust": b.store.AdjustStockTx(b.ctx, handle, 1, "tea", 1),
			} {
				ok := errors.Is(err, orders.ErrNoTransaction)
				if name == "finished" {
					ok = errors.Is(err, sql.ErrTxDone)
				}
				if !ok {
					t.Errorf("%s on %s: %v", verb, name, err)
				}
			}
		}
	}
	if after := b.counts(); after != before {
		t.Errorf("something was written without a transaction\n %s\n %s", before, after)
	}
}

func TestNestedTransactionsOfTheCaller(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.shopTable()
	b.stock("tea", 10)
	var kept, dropped, last orders.Order
	place := func(tx *gorm.DB, into *orders.Order) error {
		var err error
		*into, err = b.store.PlaceTx(b.ctx, tx, orders.NewOrder{Currency: "EUR", Amount: 1000, Items: []orders.Item{{SKU: "tea", Quantity: 1, Price: 1}}})
		return err
	}
	err := b.shop(&gorm.Config{}).Transaction(func(tx *gorm.DB) error {
		if err := tx.SavePoint("lapse_tx").Error; err != nil { // even of our name
			return err
		}
		if err := tx.Transaction(func(inner *gorm.DB) error { return place(inner, &kept) }); err != nil {
			return err
		}
		if err := tx.Transaction(func(inner *gorm.DB) error {
			if err := place(inner, &dropped); err != nil {
				return err
			}
			return errors.New("no")
		}); err == nil {
			t.Error("the inner transaction did not fail")
		}
		if _, err := b.store.RecordPaymentTx(b.ctx, tx, payment(kept.ID)); err != nil {
			return err
		}
		return place(tx, &last)
	})
	if err != nil {
		t.Fatal(err)
	}
	if b.get(kept.ID).Status != orders.Paid || b.get(last.ID).Status != orders.Unpaid {
		t.Error("the orders of the outer transaction are not there")
	}
	if _, err := b.store.Get(b.ctx, dropped.ID); !errors.Is(err, orders.ErrNotFound) {
		t.Errorf("the inner transaction was rolled back, and its order is there: %v", err)
	}
	b.wantStock("tea", 8, 1, 1)
	b.wantClean()
}

func TestDeadlockInACallersTransactionIsTheirsToRetryAndNothingFollowsIt(t *testing.T) {
	t.Parallel()
	for name, verb := range map[string]func(b *bundle, tx *gorm.DB, id int64) error{
		"cancel": func(b *bundle, tx *gorm.DB, id int64) error {
			_, err := b.store.CancelTx(b.ctx, tx, id, "u1", "changed my mind")
			return err
		},
		"pay": func(b *bundle, tx *gorm.DB, id int64) error {
			_, err := b.store.RecordPaymentTx(b.ctx, tx, payment(id))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.shopTable()
			b.stock("tea", 10)
			p := newProxy(t, b.db.DSN)
			db := b.shop(&gorm.Config{}, func(c *mysql.Config) {
				c.InterpolateParams = true
				c.Addr = p.lis.Addr().String()
			})
			id := b.place(items(orders.Item{SKU: "tea", Quantity: 3, Price: 100})).ID
			before := b.dump(id)
			b.deadlock(id, func() {
				tx := db.Begin()
				if err := tx.Exec("INSERT INTO shop_rows VALUES (1)").Error; err != nil {
					t.Error(err)
				}
				p.seen()
				err := verb(b, tx, id)
				if !orders.IsRetryable(err) {
					t.Errorf("%v is not for the caller to retry", err)
				}
				seen := p.seen()
				if last := seen[len(seen)-1]; !strings.HasPrefix(last, "UPDATE (SELECT") {
					t.Errorf("after the statement that deadlocked came %q", last)
				}
				// A caller who does not look at the error and goes on: the transaction is gone, and we do not write alone.
				if _, err := b.store.PlaceTx(b.ctx, tx, orders.NewOrder{ID: 77, Currency: "EUR"}); !errors.Is(err, orders.ErrNoTransaction) {
					t.Errorf("place in a transaction that a deadlock has ended: %v", err)
				}
				if err := tx.Rollback().Error; err != nil {
					t.Error(err)
				}
			})
			if got := b.dump(id); got != before {
				t.Errorf("something was left behind\n%s\n%s", before, got)
			}
			if n := b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE id = 77"); n != 0 {
				t.Error("an order was committed alone")
			}
			// Again from the start, it works.
			if err := db.Transaction(func(tx *gorm.DB) error { return verb(b, tx, id) }); err != nil {
				t.Errorf("again: %v", err)
			}
			if n := b.db.Int(t, "SELECT COUNT(*) FROM shop_rows"); n != 0 {
				t.Errorf("%d rows of a transaction that is gone", n)
			}
			b.wantClean()
		})
	}
}

// TestCallersAtRepeatableReadDoNotStandInEachOthersWay: that level locks gaps, and a shop's orders lie side by side.
func TestCallersAtRepeatableReadDoNotStandInEachOthersWay(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var ids []int64
	for i := range 4 {
		sku := fmt.Sprintf("tea%d", i)
		b.stock(sku, 10)
		ids = append(ids, b.place(items(orders.Item{SKU: sku, Quantity: 1, Price: 1})).ID)
	}
	db := b.shop(&gorm.Config{}, param("innodb_lock_wait_timeout", "3"))
	begin := func() *gorm.DB { return db.Begin(&sql.TxOptions{Isolation: sql.LevelRepeatableRead}) }
	one, two := begin(), begin()
	defer one.Rollback()
	defer two.Rollback()
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s had to wait or was given up: %v", what, err)
		}
	}
	_, err := b.store.RecordPaymentTx(b.ctx, one, payment(ids[1]))
	must("first payment", err)
	_, err = b.store.RecordPaymentTx(b.ctx, two, payment(ids[2]))
	must("second payment, of the next order", err)
	_, err = b.store.CancelTx(b.ctx, one, ids[3], "u1", "why not")
	must("a cancel in the first", err)
	_, err = b.store.RecordPaymentTx(b.ctx, two, payment(ids[0]))
	must("a payment in the second", err)
	must("an adjustment in the first", b.store.AdjustStockTx(b.ctx, one, 50, "new1", 1))
	must("an adjustment in the second", b.store.AdjustStockTx(b.ctx, two, 51, "new2", 1))
	ctx, stop := context.WithTimeout(b.ctx, 3*time.Second)
	defer stop()
	_, err = b.store.Place(ctx, orders.NewOrder{Currency: "EUR", Items: []orders.Item{{SKU: "tea0", Quantity: 1, Price: 1}}})
	if err == nil {
		t.Error("the order took a SKU whose row is locked") // tea0 is paid by the second: this wait is rightful
	}
	b.stock("oil", 10)
	_, err = b.store.Place(b.ctx, orders.NewOrder{Currency: "EUR", Items: []orders.Item{{SKU: "oil", Quantity: 1, Price: 1}}})
	must("an order of another customer", err)
	must("commit", one.Commit().Error)
	must("commit", two.Commit().Error)
	b.wantClean()
}

// TestOldSnapshotOfTheCallerDecidesNothing: at REPEATABLE READ a plain read still shows what was there when the caller began.
func TestOldSnapshotOfTheCallerDecidesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 100)
	line := items(orders.Item{SKU: "tea", Quantity: 3, Price: 1})
	paid, cancelled, mixed := b.place(line).ID, b.place(overdue, line).ID, b.place(line).ID
	db := b.shop(&gorm.Config{})
	tx := db.Begin(&sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	defer tx.Rollback()
	var n int64
	if err := tx.Raw("SELECT COUNT(*) FROM orders").Scan(&n).Error; err != nil || n != 3 { // opens the snapshot
		t.Fatal(n, err)
	}
	b.pay(paid)
	b.cancelDue(cancelled)
	late := notice(cancelled, "late", 1000, "EUR")
	if _, err := b.store.RecordPayment(b.ctx, late); err != nil {
		t.Fatal(err)
	}
	later, later2 := b.place(line).ID, b.place(line).ID
	more := notice(mixed, "more", 1300, "EUR")
	if _, err := b.store.RecordPayment(b.ctx, more); err != nil {
		t.Fatal(err)
	}

	check := func(what string, got any, want any, err error) {
		t.Helper()
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", what, got, err, want)
		}
	}
	out, err := b.store.CancelTx(b.ctx, tx, paid, "u1", "why not")
	check("cancel of an order paid since", out.Result, orders.ResultAlreadyPaid, err)
	r, err := b.store.RecordPaymentTx(b.ctx, tx, notice(cancelled, "x", 1000, "EUR"))
	check("payment of an order cancelled since", r, orders.PaymentResult{Outcome: orders.PaymentLate, Refund: 1000, RefundReason: orders.RefundLate}, err)
	r, err = b.store.RecordPaymentTx(b.ctx, tx, late)
	check("a notice recorded since, with its refund", r, orders.PaymentResult{Outcome: orders.PaymentLate, Repeated: true, Refund: 1000, RefundReason: orders.RefundLate}, err)
	r, err = b.store.RecordPaymentTx(b.ctx, tx, more)
	check("a notice recorded since, with an excess", r, orders.PaymentResult{Outcome: orders.PaymentAccepted, Repeated: true, Refund: 300, RefundReason: orders.RefundExcess}, err)
	out, err = b.store.CancelTx(b.ctx, tx, later, "u1", "why not")
	check("cancel of an order placed since", out.Result, orders.ResultCancelled, err)
	r, err = b.store.RecordPaymentTx(b.ctx, tx, payment(later2))
	check("payment of an order placed since", r.Outcome, orders.PaymentAccepted, err)
	if err := tx.Commit().Error; err != nil {
		t.Fatal(err)
	}
	b.wantStock("tea", 91, 0, 9)
	b.wantClean()
}

// TestRowChangedSinceTheCallersSnapshotIsForTheCallerToRetry: MariaDB can be told, and from 11.6 on is, to refuse (1020) what others would
// read in its newest state.
func TestRowChangedSinceTheCallersSnapshotIsForTheCallerToRetry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	if !b.isMariaDB() {
		t.Log("only MariaDB has that setting")
		return
	}
	b.shopTable()
	b.stock("tea", 10)
	id := b.place(items(orders.Item{SKU: "tea", Quantity: 1, Price: 1})).ID
	db := b.shop(&gorm.Config{}, param("innodb_snapshot_isolation", "ON"))
	attempts := 0
	var out orders.Outcome
	for {
		attempts++
		err := db.Transaction(func(tx *gorm.DB) error {
			var n int64
			if err := tx.Raw("SELECT COUNT(*) FROM orders").Scan(&n).Error; err != nil {
				return err
			}
			if err := tx.Exec("INSERT INTO shop_rows VALUES (1)").Error; err != nil {
				return err
			}
			if attempts == 1 {
				if _, err := b.store.ExtendDeadline(b.ctx, id, time.Now().Add(time.Hour), "support"); err != nil {
					t.Error(err)
				}
			}
			var err error
			out, err = b.store.CancelTx(b.ctx, tx, id, "u1", "why not")
			return err
		}, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
		if err == nil {
			break
		}
		if !orders.IsRetryable(err) || attempts == 3 {
			t.Fatalf("attempt %d: %v", attempts, err)
		}
	}
	if attempts != 2 || out.Result != orders.ResultCancelled {
		t.Errorf("%d attempts, %+v", attempts, out)
	}
	b.wantStock("tea", 10, 0, 0)
	b.wantClean()
}

// TestStoreOnTheCallersPool: the verbs without Tx use the shop's handle as it is, each at READ COMMITTED.
func TestStoreOnTheCallersPool(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 10)
	db := b.shop(&gorm.Config{PrepareStmt: true}, func(c *mysql.Config) {
		c.ParseTime, c.Loc, c.ClientFoundRows = true, time.FixedZone("Asia/Shanghai", 8*3600), true
		param("time_zone", "'+08:00'")(c)
		param("sql_mode", "''")(c)
	})
	store, err := orders.New(db, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Ready(b.ctx); err != nil {
		t.Error(err)
	}
	before := time.Now()
	c := b.on(store)
	o := c.place(items(orders.Item{SKU: "tea", Quantity: 3, Price: 100}))
	if d := o.CreatedAt.Sub(before); d < -5*time.Second || d > time.Minute {
		t.Errorf("created %s from now: a time zone crept in", d)
	}
	got := c.get(o.ID)
	if !got.CreatedAt.Equal(o.CreatedAt) || !got.DeadlineAt.Equal(o.CreatedAt.Add(30*time.Minute)) {
		t.Errorf("placed %+v, read %+v", o, got)
	}
	c.pay(o.ID)
	late := c.place(overdue, items(orders.Item{SKU: "tea", Quantity: 3, Price: 100}))
	if out := c.cancelDue(late.ID); out[0].Result != orders.ResultCancelled {
		t.Errorf("%+v", out)
	}
	c.wantStock("tea", 7, 0, 3)
	c.wantClean()
	if err := store.Close(); err != nil {
		t.Error(err)
	}
	if err := db.Exec("DO 0").Error; err != nil {
		t.Errorf("closing the store closed the shop's pool: %v", err)
	}
}

// case DB-17
func TestPreparedStatementsDoNotPileUp(t *testing.T) {
	t.Parallel()
	b := setup(t)
	db := b.shop(&gorm.Config{PrepareStmt: true})
	store, err := orders.New(db, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	var ids []int64
	var many []orders.Item
	if err := db.Transaction(func(tx *gorm.DB) error {
		for range 500 {
			o, err := store.PlaceTx(b.ctx, tx, orders.NewOrder{Currency: "EUR", NoDeadline: true})
			if err != nil {
				return err
			}
			ids = append(ids, o.ID)
		}
		for i := range 100 {
			it := orders.Item{SKU: fmt.Sprintf("s%d", i), Quantity: 1, Price: 1}
			many = append(many, it)
			if err := store.AdjustStockTx(b.ctx, tx, 1, it.SKU, 1000); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for n := 1; n <= 500; n += 11 {
		out, err := store.CancelDue(b.ctx, text(ids[:n]...))
		if err != nil || out[n-1].Result != orders.ResultExempt {
			t.Fatal(out, err)
		}
		if n > len(many) {
			continue
		}
		if err := db.Transaction(func(tx *gorm.DB) error {
			o, err := store.PlaceTx(b.ctx, tx, orders.NewOrder{Currency: "EUR", Items: many[:n]})
			if err != nil {
				return err
			}
			_, err = store.CancelTx(b.ctx, tx, o.ID, "u1", "why not")
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if b.isMariaDB() { // knows only the sum over all sessions, other tests' too
		if n := b.db.Int(t, "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = 'Prepared_stmt_count'"); n > 60 {
			t.Errorf("%d prepared statements are open", n)
		}
		return
	}
	n := b.db.Int(t, `SELECT COUNT(*) FROM performance_schema.prepared_statements_instances s JOIN performance_schema.threads h ON h.THREAD_ID = s.OWNER_THREAD_ID
		WHERE h.PROCESSLIST_DB = DATABASE()`)
	if n > 5 {
		t.Errorf("%d prepared statements are open after lists of 1 to 500 ids", n)
	}
}

// TestManyCallersInTheirOwnTransactions holds that only deadlocks and cut-off waits come back to callers, and that running the
// transaction again is all they have to do.
func TestManyCallersInTheirOwnTransactions(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 3 {
		b.stock(fmt.Sprintf("s%d", i), 100_000)
	}
	for _, isolation := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelReadCommitted} {
		db := b.shop(&gorm.Config{})
		var callers sync.WaitGroup
		for w := range 4 {
			callers.Go(func() {
				for i := range 6 {
					first, second := fmt.Sprintf("s%d", (w+i)%3), fmt.Sprintf("s%d", (w+i+1)%3)
					for {
						err := db.Transaction(func(tx *gorm.DB) error {
							// Two orders in one transaction: the stock of the first is locked before the second begins.
							for _, sku := range []string{first, second} {
								o, err := b.store.PlaceTx(b.ctx, tx, orders.NewOrder{Currency: "EUR", Amount: 1000, Items: []orders.Item{{SKU: sku, Quantity: 1, Price: 1}}})
								if err != nil {
									return err
								}
								if _, err := b.store.RecordPaymentTx(b.ctx, tx, payment(o.ID)); err != nil {
									return err
								}
							}
							return nil
						}, &sql.TxOptions{Isolation: isolation})
						if err == nil {
							break
						}
						if !orders.IsRetryable(err) {
							t.Errorf("%s: %v", isolation, err)
							return
						}
					}
				}
			})
		}
		callers.Wait()
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE status = 'paid'"); n != 2*4*6*2 {
		t.Errorf("%d paid orders, want %d", n, 2*4*6*2)
	}
	b.wantClean()
}
