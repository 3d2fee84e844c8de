package orders_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"gorm.io/gorm"

	"github.com/lapse-orders/lapse/orders"
)

var (
	oneHash   = [32]byte{1}
	otherHash = [32]byte{2}
)

func TestOneKeyPlacesOneOrderHoweverOftenItComes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 100)
	const callers, keys = 12, 20
	n := orders.NewOrder{Currency: "EUR", Amount: 1000, Items: []orders.Item{{SKU: "tea", Quantity: 2, Price: 500}}}
	for k := range keys {
		key := fmt.Sprintf("key-%d", k)
		var mu sync.Mutex
		var got []orders.Order
		placed := 0
		call := func() {
			o, repeated, err := b.store.PlaceOnce(b.ctx, key, oneHash, n)
			if err != nil {
				t.Errorf("%s: %v", key, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			got = append(got, o)
			if !repeated {
				placed++
			}
		}
		calls := make([]func(), callers)
		for i := range calls {
			calls[i] = call
		}
		atOnce(calls...)
		if placed != 1 {
			t.Errorf("%s: %d callers were told that they placed the order, want 1", key, placed)
		}
		for _, o := range got {
			if !reflect.DeepEqual(o, got[0]) {
				t.Errorf("%s: one caller got\n%+v\nanother\n%+v", key, got[0], o)
			}
		}
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders"); n != keys {
		t.Errorf("there are %d orders, want %d", n, keys)
	}
	if n := b.db.Int(t, "SELECT reserved FROM stock"); n != 2*keys {
		t.Errorf("%d are reserved, want %d", n, 2*keys)
	}
}

func TestARepetitionGetsTheFirstAnswerWhateverBecameOfTheOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 100)
	n := orders.NewOrder{Channel: "web", UserID: "u", Currency: "EUR", Amount: 1000, Items: []orders.Item{{SKU: "tea", Quantity: 2, Price: 500}}}
	first, repeated, err := b.store.PlaceOnce(b.ctx, "k", oneHash, n)
	if err != nil || repeated {
		t.Fatalf("repeated %t, %v", repeated, err)
	}
	if _, err := b.store.ExtendDeadline(b.ctx, first.ID, first.DeadlineAt.Add(time.Hour), "me"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.store.RecordPayment(b.ctx, payment(first.ID)); err != nil {
		t.Fatal(err)
	}
	again, repeated, err := b.store.PlaceOnce(b.ctx, "k", oneHash, n)
	if err != nil || !repeated || !reflect.DeepEqual(again, first) {
		t.Errorf("repeated %t, %v:\n%+v\nwant\n%+v", repeated, err, again, first)
	}
	eternal, _, err := b.store.PlaceOnce(b.ctx, "K", oneHash, orders.NewOrder{ID: 7, Currency: "EUR", NoDeadline: true})
	if err != nil || eternal.ID != 7 {
		t.Fatalf("a key in another case is another key: order %d, %v", eternal.ID, err)
	}
	again, _, err = b.store.PlaceOnce(b.ctx, "K", oneHash, orders.NewOrder{ID: 7, Currency: "EUR", NoDeadline: true})
	if err != nil || again.DeadlineAt != nil || again.ID != 7 {
		t.Errorf("an order without deadline is repeated as %+v, %v", again, err)
	}
}

func TestAKeyIsRefusedForAnotherRequestAndFreeAfterARefusal(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 1)
	want := func(err, target error) {
		t.Helper()
		if !errors.Is(err, target) {
			t.Errorf("error is %v, want %v", err, target)
		}
	}
	n := orders.NewOrder{ID: 5, Currency: "EUR", Items: []orders.Item{{SKU: "tea", Quantity: 2, Price: 500}}}
	_, _, err := b.store.PlaceOnce(b.ctx, "k", oneHash, n)
	want(err, orders.ErrOutOfStock)
	if keys := b.db.Int(t, "SELECT COUNT(*) FROM idempotency_keys"); keys != 0 {
		t.Errorf("a refused order leaves %d keys", keys)
	}
	n.Items[0].Quantity = 1
	if _, repeated, err := b.store.PlaceOnce(b.ctx, "k", otherHash, n); err != nil || repeated {
		t.Errorf("the key of a refused order is not free: repeated %t, %v", repeated, err)
	}
	_, _, err = b.store.PlaceOnce(b.ctx, "k", oneHash, n)
	want(err, orders.ErrKeyReused)
	_, _, err = b.store.PlaceOnce(b.ctx, "k2", oneHash, n)
	want(err, orders.ErrExists)
	for _, bad := range []string{"", strings.Repeat("k", 129), "a b", "a\x00", "ü", "\x7f"} {
		_, _, err = b.store.PlaceOnce(b.ctx, bad, oneHash, n)
		want(err, orders.ErrInvalid)
	}
	if _, _, err := b.store.PlaceOnce(b.ctx, strings.Repeat("k", 128), oneHash, orders.NewOrder{Currency: "EUR"}); err != nil {
		t.Errorf("a key of 128 characters: %v", err)
	}
	b.db.Exec(t, "DELETE FROM orders WHERE id = 5")
	_, _, err = b.store.PlaceOnce(b.ctx, "k", otherHash, n)
	want(err, orders.ErrNotFound)
}

// A caller's snapshot that is older than the order shows it all the same, and a rollback takes the key with it.
func TestAKeyInTheCallersTransaction(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"'READ-COMMITTED'", "'REPEATABLE-READ'"} {
		b := setup(t)
		db := b.shop(&gorm.Config{}, param("transaction_isolation", level), param("time_zone", "'+08:00'"), func(c *mysql.Config) { c.ClientFoundRows = true })
		n := orders.NewOrder{Currency: "EUR", Amount: 7}
		rollback := errors.New("changed my mind")
		err := db.Transaction(func(tx *gorm.DB) error {
			if _, _, err := b.store.PlaceOnceTx(b.ctx, tx, "k", oneHash, n); err != nil {
				return err
			}
			return rollback
		})
		if !errors.Is(err, rollback) || b.db.Int(t, "SELECT COUNT(*) FROM idempotency_keys") != 0 {
			t.Fatalf("%s: after the rollback: %v", level, err)
		}
		var first, seen orders.Order
		err = db.Transaction(func(tx *gorm.DB) error {
			var count int64
			if err := tx.Raw("SELECT COUNT(*) FROM orders").Scan(&count).Error; err != nil { // takes the snapshot
				return err
			}
			var err error
			if first, _, err = b.store.PlaceOnce(b.ctx, "k", oneHash, n); err != nil { // in a transaction of its own
				return err
			}
			var repeated bool
			if seen, repeated, err = b.store.PlaceOnceTx(b.ctx, tx, "k", oneHash, n); err != nil || !repeated {
				return fmt.Errorf("repeated %t, %w", repeated, err)
			}
			if _, _, err := b.store.PlaceOnceTx(b.ctx, tx, "k", otherHash, n); !errors.Is(err, orders.ErrKeyReused) {
				return fmt.Errorf("another request: %w", err)
			}
			_, repeated, err = b.store.PlaceOnceTx(b.ctx, tx, "fresh", oneHash, n) // the transaction is still good
			if repeated {
				return errors.New("a fresh key is repeated")
			}
			return err
		})
		if err != nil {
			t.Fatalf("%s: %v", level, err)
		}
		if !reflect.DeepEqual(first, seen) {
			t.Errorf("%s: the repetition gives\n%+v\nwant\n%+v", level, seen, first)
		}
		if n := b.db.Int(t, "SELECT COUNT(*) FROM orders"); n != 2 {
			t.Errorf("%s: %d orders, want 2", level, n)
		}
	}
}

// A caller that waits for a key whose holder gives up places the order itself.
func TestAKeyWhoseHolderGivesUpIsTakenByWhoeverWaits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	db := b.shop(&gorm.Config{})
	n := orders.NewOrder{Currency: "EUR", Amount: 7}
	type result struct {
		repeated bool
		err      error
	}
	const waiters = 4
	results := make(chan result, waiters)
	giveUp := errors.New("give up")
	err := db.Transaction(func(tx *gorm.DB) error {
		if _, _, err := b.store.PlaceOnceTx(b.ctx, tx, "k", oneHash, n); err != nil {
			return err
		}
		for range waiters {
			go func() {
				_, repeated, err := b.store.PlaceOnce(b.ctx, "k", oneHash, n)
				results <- result{repeated, err}
			}()
		}
		b.awaitLockWaits(waiters)
		return giveUp
	})
	if !errors.Is(err, giveUp) {
		t.Fatal(err)
	}
	placed := 0
	for range waiters {
		select {
		case r := <-results:
			if r.err != nil {
				t.Error(r.err)
			}
			if !r.repeated {
				placed++
			}
		case <-b.ctx.Done():
			t.Fatal(context.Cause(b.ctx))
		}
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders"); placed != 1 || n != 1 {
		t.Errorf("%d callers placed %d orders, want 1 and 1", placed, n)
	}
}

func TestKeysAreForgottenWhenTheirRetentionIsOver(t *testing.T) {
	t.Parallel()
	b := setupWith(t, orders.Config{KeyRetention: time.Hour})
	for _, key := range []string{"c", "a", "b", "fresh"} {
		if _, _, err := b.store.PlaceOnce(b.ctx, key, oneHash, orders.NewOrder{Currency: "EUR"}); err != nil {
			t.Fatal(err)
		}
	}
	b.db.Exec(t, "UPDATE idempotency_keys SET created_at = UTC_TIMESTAMP(3) - INTERVAL 61 MINUTE WHERE idempotency_key <> 'fresh'")
	b.db.Exec(t, "UPDATE idempotency_keys SET created_at = created_at - INTERVAL 1 MINUTE WHERE idempotency_key = 'b'")
	for _, want := range []struct {
		limit, deleted int
		left           string
	}{{1, 1, "a,c,fresh"}, {500, 2, "fresh"}, {500, 0, "fresh"}} {
		n, err := b.store.PurgeKeys(b.ctx, want.limit)
		left := b.db.Text(t, "SELECT GROUP_CONCAT(idempotency_key ORDER BY idempotency_key) FROM idempotency_keys")
		if err != nil || n != want.deleted || left != want.left {
			t.Errorf("%d keys purged, %v, left are %s; want %d and %s", n, err, left, want.deleted, want.left)
		}
	}
	if _, repeated, err := b.store.PlaceOnce(b.ctx, "a", otherHash, orders.NewOrder{Currency: "EUR"}); err != nil || repeated {
		t.Errorf("a key that was forgotten: repeated %t, %v", repeated, err)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders"); n != 5 {
		t.Errorf("%d orders, want 5: a purge takes keys only", n)
	}
	for _, limit := range []int{0, -1, 501} {
		if _, err := b.store.PurgeKeys(b.ctx, limit); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("a purge of %d: %v", limit, err)
		}
	}
}
