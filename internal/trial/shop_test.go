package trial

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// counter is a checkout that keeps orders in memory. before may fail a call, before or after it took effect.
type counter struct {
	mu     sync.Mutex // guards the following
	orders map[int64]*orders.Order
	log    []string
	begun  time.Time
	before func(verb string, n int) (err error, effect bool)
	calls  map[string]int
}

func newCounter() *counter {
	return &counter{orders: map[int64]*orders.Order{}, calls: map[string]int{}, begun: time.Now()}
}

// call notes a call and runs it, unless before says otherwise.
func (c *counter) call(verb string, do func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls[verb]++
	c.log = append(c.log, fmt.Sprintf("%s %s", time.Since(c.begun), verb))
	if c.before != nil {
		if err, effect := c.before(verb, c.calls[verb]); err != nil {
			if effect {
				_ = do()
			}
			return err
		}
	}
	return do()
}

func (c *counter) PlaceOrder(_ context.Context, n orders.NewOrder) (o orders.Order, err error) {
	err = c.call("place", func() error {
		if c.orders[n.ID] != nil {
			return orders.ErrExists
		}
		deadline := time.Now().Add(n.Timeout)
		o = orders.Order{ID: n.ID, Amount: n.Amount, Status: orders.Unpaid, DeadlineAt: &deadline}
		c.orders[n.ID] = &o
		return nil
	})
	return o, err
}

func (c *counter) RecordPayment(_ context.Context, p orders.Payment) (r orders.PaymentResult, err error) {
	err = c.call("pay "+p.TransactionID[len(p.TransactionID)-1:], func() error {
		r = orders.PaymentResult{Outcome: orders.PaymentAccepted}
		return nil
	})
	return r, err
}

func (c *counter) ExtendDeadline(_ context.Context, id int64, until time.Time, _ string) (x orders.Extension, err error) {
	err = c.call("extend", func() error {
		c.orders[id].DeadlineAt = &until
		x = orders.Extension{Extended: true, Status: orders.Unpaid, DeadlineAt: until}
		return nil
	})
	return x, err
}

func (c *counter) Cancel(context.Context, int64, string, string) (out orders.Outcome, err error) {
	err = c.call("cancel", func() error {
		out.Result = orders.ResultCancelled
		return nil
	})
	return out, err
}

func (c *counter) Get(_ context.Context, id int64) (o orders.Order, err error) {
	err = c.call("get", func() error {
		o = *c.orders[id]
		return nil
	})
	return o, err
}

func serve(ctx context.Context, c *counter, customers ...Customer) []Account {
	s := &Shop{Run: "run", Checkout: c, Ledger: NewLedger(), Rate: 2, Timeout: 10 * time.Second}
	s.Serve(ctx, customers)
	return s.Ledger.Accounts()
}

func TestCustomersComeAtTheRateAndActOnTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCounter()
		accounts := serve(t.Context(), c,
			Customer{Kind: Extends, Amount: 100, Acts: []Act{
				{After: 3 * time.Second, Extend: 4 * time.Second},
				{ToDeadline: true, After: -time.Second, Notices: []Notice{{1, 100}, {1, 100}}},
			}},
			Customer{Kind: CancelsByHand, Amount: 100, Acts: []Act{{After: time.Second, Cancel: true}}},
		)
		want := []string{"0s place", "500ms place", "1.5s cancel", "3s extend", "13s pay 1", "13s pay 1"}
		if fmt.Sprint(c.log) != fmt.Sprint(want) {
			t.Errorf("%v, want %v", c.log, want)
		}
		a := accounts[0]
		if !a.Placed || !a.Deadline.Equal(c.begun.Add(14*time.Second)) || len(a.Payments[orders.FormatID(a.ID)+"-1"].Answers) != 2 || a.Calls != 4 {
			t.Errorf("%+v", a)
		}
		if !accounts[1].cancelledByHand() {
			t.Errorf("%+v", accounts[1])
		}
	})
}

func TestACallThatFailsIsAskedAgainUntilThereIsAnAnswer(t *testing.T) {
	t.Parallel()
	for _, effect := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c := newCounter()
			c.before = func(_ string, n int) (error, bool) {
				if n < 3 {
					return errors.New("commit: connection lost"), effect
				}
				return nil, false
			}
			a := serve(t.Context(), c, Customer{Amount: 100, Acts: []Act{{After: time.Second, Notices: []Notice{{1, 100}}}}})[0]
			if !a.Placed || a.Deadline.IsZero() || len(a.Failures) != 0 || !a.accepted() {
				t.Errorf("effect %t: %+v", effect, a)
			}
		})
	}
}

func TestAnswersThatCannotChangeAreNotAskedForAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, test := range []struct {
			err     error
			refused bool
		}{{&orders.StockError{}, false}, {orders.ErrOutOfStock, true}, {orders.ErrInvalid, false}, {orders.ErrExists, false}} {
			c := newCounter()
			c.before = func(string, int) (error, bool) { return fmt.Errorf("place: %w", test.err), false }
			a := serve(t.Context(), c, Customer{Amount: 100, Acts: []Act{{After: time.Second, Cancel: true}}})[0]
			if len(c.log) != 1 || a.Placed || (a.Refused != "") == (len(a.Failures) > 0) {
				t.Errorf("%v: calls %v, %+v", test.err, c.log, a)
			}
			if test.refused != (a.Refused != "") && !errors.Is(test.err, orders.ErrOutOfStock) {
				t.Errorf("%v: refused %q, failures %v", test.err, a.Refused, a.Failures)
			}
		}
	})
}

func TestACallThatNeverWorksIsWrittenDown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCounter()
		c.before = func(verb string, _ int) (error, bool) {
			if verb == "cancel" {
				return errors.New("no route to host"), false
			}
			return nil, false
		}
		a := serve(t.Context(), c, Customer{Amount: 100, Acts: []Act{{After: time.Second, Cancel: true}}})[0]
		if took := time.Since(c.begun); took < patience || took > patience+5*time.Second {
			t.Errorf("given up after %s, want about %s", took, patience)
		}
		if len(a.Failures) != 1 || a.Failures[0] != "cancel by hand: no route to host" {
			t.Errorf("failures %q", a.Failures)
		}
	})
}

func TestAnInterruptedShopEndsAtOnceAndBlamesNobody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCounter()
		ctx, cancel := context.WithTimeout(t.Context(), 2200*time.Millisecond)
		defer cancel()
		c.before = func(verb string, _ int) (error, bool) {
			if verb == "pay 1" {
				return errors.New("busy"), false
			}
			return nil, false
		}
		customers := make([]Customer, 100)
		for i := range customers {
			customers[i] = Customer{Amount: 100, Acts: []Act{{After: time.Second, Notices: []Notice{{1, 100}}}, {After: time.Hour, Cancel: true}}}
		}
		accounts := serve(ctx, c, customers...)
		if took := time.Since(c.begun); took != 2200*time.Millisecond || len(accounts) != 5 {
			t.Errorf("%d orders in %s", len(accounts), took)
		}
		for _, a := range accounts {
			if len(a.Failures) != 0 {
				t.Errorf("%+v", a)
			}
		}
	})
}

func TestAnExtensionThatCameTooLateIsAnAnswer(t *testing.T) {
	t.Parallel()
	for took, refused := range map[time.Duration]bool{7 * time.Second: true, time.Second: false} {
		synctest.Test(t, func(t *testing.T) {
			c := newCounter()
			c.before = func(verb string, _ int) (error, bool) {
				if verb != "extend" {
					return nil, false
				}
				waitUntil(context.Background(), time.Now().Add(took))
				return fmt.Errorf("the deadline lies in the past: %w", orders.ErrInvalid), false
			}
			a := serve(t.Context(), c, Customer{Amount: 100, Acts: []Act{{After: 5 * time.Second, Extend: 2 * time.Second}}})[0]
			if (len(a.Failures) == 0) != refused || !a.Deadline.Equal(c.begun.Add(10*time.Second)) {
				t.Errorf("answered after %s: %+v", took, a)
			}
		})
	}
}
