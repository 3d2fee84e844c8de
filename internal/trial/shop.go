package trial

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// Checkout is what the shop needs of lapse. *producer.Client is one.
type Checkout interface {
	PlaceOrder(ctx context.Context, n orders.NewOrder) (orders.Order, error)
	RecordPayment(ctx context.Context, p orders.Payment) (orders.PaymentResult, error)
	ExtendDeadline(ctx context.Context, id int64, until time.Time, actor string) (orders.Extension, error)
	Cancel(ctx context.Context, id int64, actor, reason string) (orders.Outcome, error)
	Get(ctx context.Context, id int64) (orders.Order, error)
}

const (
	// gateway and handReason mark what a trial writes.
	gateway    = "trial"
	handReason = "the customer changed their mind"
	actor      = "trial"
	// patience is how long a call that fails is asked again. A gateway asks for days; a trial has to end.
	patience = time.Minute
)

// Shop is the load generator: it lets customers place their orders and act on them, and writes down what it was told. Nothing in it knows
// what lapse runs on or what goes wrong meanwhile.
type Shop struct {
	Run      string // the name of the run; it becomes the orders' channel
	Checkout Checkout
	Ledger   *Ledger
	Rate     float64 // orders a second
	Timeout  time.Duration
	// ClockAhead is how far the database's clock is ahead of this process's: deadlines are the database's.
	ClockAhead time.Duration
}

// Serve lets all customers come, at the shop's rate, and returns when the last one has done everything, or soon after ctx has ended.
func (s *Shop) Serve(ctx context.Context, customers []Customer) {
	var wg sync.WaitGroup
	defer wg.Wait()
	start := time.Now()
	for i, c := range customers {
		// From the start, not from the one before: pauses must not add up.
		if !waitUntil(ctx, start.Add(time.Duration(float64(i)/s.Rate*float64(time.Second)))) {
			return
		}
		wg.Go(func() { s.serve(ctx, c) })
	}
}

func (s *Shop) serve(ctx context.Context, c Customer) {
	id := orders.NewID()
	s.Ledger.open(id, c)
	if !s.place(ctx, id, c) {
		return
	}
	placed := time.Now()
	for _, act := range c.Acts {
		at := placed.Add(act.After)
		if act.ToDeadline {
			at = s.Ledger.deadline(id).Add(-s.ClockAhead).Add(act.After)
		}
		if !waitUntil(ctx, at) {
			return
		}
		s.act(ctx, id, act)
	}
}

// place places the order until there is an answer, and reports whether the order is there.
func (s *Shop) place(ctx context.Context, id int64, c Customer) bool {
	tried := false
	err := ask(ctx, func() error {
		o, err := s.Checkout.PlaceOrder(ctx, orders.NewOrder{
			ID: id, Channel: s.Run, UserID: fmt.Sprintf("customer-%d", c.Number), Currency: currency, Amount: c.Amount, Items: c.Items, Timeout: s.Timeout,
		})
		if errors.Is(err, orders.ErrExists) && tried {
			// An earlier attempt had been committed though its answer was an error.
			o, err = s.Checkout.Get(ctx, id)
		}
		tried = true
		if err == nil {
			s.Ledger.placed(id, *o.DeadlineAt)
		}
		return err
	})
	switch {
	case err == nil:
		return true
	case ctx.Err() != nil:
	case errors.Is(err, orders.ErrOutOfStock):
		s.Ledger.refused(id, orders.ErrOutOfStock.Error())
	default:
		s.Ledger.failed(id, "place", err)
	}
	return false
}

func (s *Shop) act(ctx context.Context, id int64, act Act) {
	switch {
	case act.Cancel:
		s.call(ctx, id, "cancel by hand", func() error {
			out, err := s.Checkout.Cancel(ctx, id, actor, handReason)
			if err == nil {
				s.Ledger.cancelled(id, out.Result)
			}
			return err
		})
	case act.Extend > 0:
		until := s.Ledger.deadline(id).Add(act.Extend)
		s.call(ctx, id, "extend", func() error {
			x, err := s.Checkout.ExtendDeadline(ctx, id, until, actor)
			if errors.Is(err, orders.ErrInvalid) && until.Before(time.Now().Add(s.ClockAhead+time.Second)) {
				// The call took longer than the extension would have lasted (the second is for the clocks' difference). That the
				// past is refused is an answer.
				x, err = orders.Extension{}, nil
			}
			if err == nil {
				s.Ledger.extended(id, x)
			}
			return err
		})
	default:
		var wg sync.WaitGroup
		for _, n := range act.Notices {
			wg.Go(func() { s.notify(ctx, id, n) })
		}
		wg.Wait()
	}
}

func (s *Shop) notify(ctx context.Context, id int64, n Notice) {
	p := orders.Payment{
		Gateway: gateway, TransactionID: fmt.Sprintf("%s-%d", orders.FormatID(id), n.Transaction), OrderID: id, Currency: currency, Amount: n.Amount,
		PaidAt: time.Now(),
	}
	s.call(ctx, id, "pay", func() error {
		result, err := s.Checkout.RecordPayment(ctx, p)
		if err == nil {
			s.Ledger.paid(id, p.TransactionID, p.Amount, result)
		}
		return err
	})
}

// call asks until there is an answer and writes down a failure.
func (s *Shop) call(ctx context.Context, id int64, doing string, do func() error) {
	if err := ask(ctx, do); err != nil && ctx.Err() == nil {
		s.Ledger.failed(id, doing, err)
	}
}

// ask does something again until it succeeds, fails for good, or patience or ctx ends; it gives the last error. Every verb of lapse may be
// repeated after an error, that is its contract.
func ask(ctx context.Context, do func() error) error {
	giveUp := time.Now().Add(patience)
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		err := do()
		if err == nil || final(err) || time.Now().After(giveUp) || !waitUntil(ctx, time.Now().Add(pause)) {
			return err
		}
	}
}

// final reports whether asking again cannot change the answer.
func final(err error) bool {
	for _, e := range []error{orders.ErrInvalid, orders.ErrNotFound, orders.ErrExists, orders.ErrOutOfStock, orders.ErrUnknownSKU, orders.ErrPaymentConflict} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// waitUntil waits for an instant and reports whether it came before ctx ended.
func waitUntil(ctx context.Context, at time.Time) bool {
	timer := time.NewTimer(time.Until(at))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
