package payments

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/orders"
)

// Store is what the gate needs of the orders; *orders.Store has it, and its documentation says what each verb does.
type Store interface {
	CheckDue(ctx context.Context, ids []string) ([]orders.Outcome, error)
	CancelDue(ctx context.Context, ids []string) ([]orders.Outcome, error)
	Hold(ctx context.Context, doubts []orders.Doubt, limits orders.HoldLimits) ([]orders.Outcome, error)
	RecordPayment(ctx context.Context, p orders.Payment) (orders.PaymentResult, error)
	EarlyWait() time.Duration
}

// GateConfig has the settings of a [Gate]. The zero value of each field means its default.
type GateConfig struct {
	// Name is what the gateway's payments are recorded under. It must be the name that its notices carry: the same money under two names
	// would be two payments. Required.
	Name string
	// DecideWithin bounds the time of all calls for one batch of orders. An order whose answers are not there by then is held. Of a shorter
	// deadline of the caller half is taken, so that the other half is left for the transaction. Default 4 s.
	DecideWithin time.Duration
	// Concurrency bounds the orders that are asked about at once. Default 32.
	Concurrency int
	// HoldMin and HoldMax bound the time for which an order in doubt is held: as long as it is overdue. Defaults 10 s and 10 minutes.
	HoldMin, HoldMax time.Duration
	// GiveUpAfter is how long after its deadline an order in doubt is parked instead. Default 24 hours.
	GiveUpAfter time.Duration
	// Logger gets what an operator should know, never per order. Default: nil, silent.
	Logger *slog.Logger
	// Registerer gets the metrics lapse_gate_*. Several gates may share one. Default: nil, off.
	Registerer prometheus.Registerer
}

// WithDefaults fills in what is not set.
func (c GateConfig) WithDefaults() GateConfig {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.DecideWithin, 4*time.Second)
	def(&c.HoldMin, 10*time.Second)
	def(&c.HoldMax, 10*time.Minute)
	def(&c.GiveUpAfter, 24*time.Hour)
	if c.Concurrency == 0 {
		c.Concurrency = 32
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c GateConfig) validate() error {
	switch {
	case c.Name == "":
		return errors.New("the gateway has no name: payments are recorded under it")
	case c.DecideWithin <= 0 || c.HoldMin <= 0 || c.GiveUpAfter <= 0:
		return fmt.Errorf("decide within %s, hold at least %s, give up after %s: all must be positive", c.DecideWithin, c.HoldMin, c.GiveUpAfter)
	case c.HoldMax < c.HoldMin:
		return fmt.Errorf("hold at least %s and at most %s: the first must not be more", c.HoldMin, c.HoldMax)
	case c.Concurrency < 1:
		return fmt.Errorf("concurrency %d: must be positive", c.Concurrency)
	}
	return nil
}

// patience is how long orders that have their answers wait for others of their batch. An order that is cancelled a quarter of a second later
// is on time; a transaction for each would cost more than that.
const patience = 250 * time.Millisecond

// Gate is a canceller of due orders that asks the gateway first. It is safe for concurrent use.
type Gate struct {
	store   Store
	gateway Gateway
	cfg     GateConfig
	slots   chan struct{} // one for each order that is asked about
	metrics *gateMetrics
}

// NewGate makes a gate. The errors are those of the configuration.
func NewGate(store Store, gateway Gateway, cfg GateConfig) (*Gate, error) {
	if store == nil || gateway == nil {
		return nil, errors.New("new gate: a store and a gateway are needed")
	}
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("new gate: %w", err)
	}
	m, err := newGateMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register metrics of the gate: %w", err)
	}
	return &Gate{store: store, gateway: gateway, cfg: cfg, slots: make(chan struct{}, cfg.Concurrency), metrics: m}, nil
}

// EarlyWait is that of the store.
func (g *Gate) EarlyWait() time.Duration { return g.store.EarlyWait() }

// CancelDue does what [orders.Store.CancelDue] does, but for orders that the gateway cannot answer for: they are held, or parked. Only orders
// that would be cancelled are asked about, and those that have their answer do not wait for the others. As ever, an error means that nothing
// may be assumed about any of the ids: ask again.
func (g *Gate) CancelDue(ctx context.Context, ids []string) ([]orders.Outcome, error) {
	outcomes, err := g.store.CheckDue(ctx, ids)
	if err != nil {
		return nil, err
	}
	places := map[string][]int{} // of the orders that are due
	for i, o := range outcomes {
		if o.Result == orders.ResultDue {
			places[o.ID] = append(places[o.ID], i)
		}
	}
	if len(places) == 0 {
		return outcomes, nil
	}
	settle := func(o orders.Outcome) {
		for n, i := range places[o.ID] {
			if n > 0 && o.Result == orders.ResultCancelled {
				o = orders.Outcome{ID: o.ID, Result: orders.ResultAlreadyCancelled} // an order is cancelled once, however often it was named
			}
			outcomes[i] = o
		}
	}

	asking, stop := context.WithTimeout(ctx, g.budget(ctx))
	defer stop()
	verdicts := make(chan verdict, len(places))
	for id := range places {
		go func() { verdicts <- g.ask(ctx, asking, id) }() // ends with asking at the latest, but for a payment that is being recorded
	}
	var answered []string
	var doubts []orders.Doubt
	tick := time.NewTicker(patience)
	defer tick.Stop()
	var failure error
	for left := len(places); left > 0; {
		select {
		case v := <-verdicts:
			left--
			switch {
			case v.err != nil:
				failure = errors.Join(failure, v.err)
			case v.doubt != nil:
				doubts = append(doubts, *v.doubt)
			default:
				answered = append(answered, v.id)
			}
			if left > 0 {
				continue
			}
		case <-tick.C:
		}
		if len(answered) == 0 {
			continue
		}
		done, err := g.store.CancelDue(ctx, answered)
		if err != nil {
			failure = errors.Join(failure, err)
		}
		for _, o := range done {
			settle(o)
		}
		answered = nil
	}
	if len(doubts) > 0 {
		held, err := g.store.Hold(ctx, doubts, orders.HoldLimits{Min: g.cfg.HoldMin, Max: g.cfg.HoldMax, GiveUpAfter: g.cfg.GiveUpAfter})
		if err != nil {
			failure = errors.Join(failure, err)
		}
		parked := 0
		for _, o := range held {
			settle(o)
			g.metrics.doubts.WithLabelValues(string(o.Result)).Inc()
			if o.Result == orders.ResultParked {
				parked++
			}
		}
		if parked > 0 {
			g.cfg.Logger.Error("orders are parked: the gateway does not say whether they are paid", "orders", parked, "first", doubts[0].ID, "reason", doubts[0].Reason)
		}
	}
	if failure != nil {
		return nil, failure
	}
	return outcomes, nil
}

// budget is the time for all calls of one batch.
func (g *Gate) budget(ctx context.Context) time.Duration {
	budget := g.cfg.DecideWithin
	if deadline, has := ctx.Deadline(); has {
		budget = min(budget, time.Until(deadline)/2)
	}
	return budget
}

// verdict is what became of asking about one order: it may be cancelled if its row still says so, or it is in doubt, or the database failed.
type verdict struct {
	id    string
	doubt *orders.Doubt
	err   error
}

// ask goes through the calls for one order, within asking.
func (g *Gate) ask(ctx, asking context.Context, text string) verdict {
	v := verdict{id: text}
	id, err := orders.ParseID(text)
	if err != nil {
		v.err = err // the store calls only ids of its own due
		return v
	}
	select {
	case g.slots <- struct{}{}:
		defer func() { <-g.slots }()
	case <-asking.Done():
		v.doubt = &orders.Doubt{ID: id, Reason: fmt.Sprintf("the gateway is too slow: it could not be asked within %s", g.cfg.DecideWithin)}
		return v
	}
	a, err := g.gateway.Status(asking, id)
	if err != nil {
		v.doubt = &orders.Doubt{ID: id, Reason: err.Error()}
		return v
	}
	switch a.State {
	case StateClosed, StateAlreadyClosed:
		return v
	case StateNone, StateUnpaid:
	case StatePaid:
		settled, stop := g.record(ctx, &v, id, a.Paid)
		if stop || settled {
			return v
		}
		// The money was not what the order costs, and goes back; what was paid does not keep the order.
	default:
		v.doubt = doubtful(id, callStatus, a)
		return v
	}

	if a, err = g.gateway.Close(asking, id); err != nil {
		v.doubt = &orders.Doubt{ID: id, Reason: err.Error(), Close: !errors.Is(err, ErrNotAsked)}
		return v
	}
	switch a.State {
	case StateClosed, StateAlreadyClosed, StateNone:
	case StatePaid:
		g.record(ctx, &v, id, a.Paid)
	case StateUnknown, StateUnpaid:
		v.doubt = doubtful(id, callClose, a)
		v.doubt.Close = true
	default:
		v.doubt = doubtful(id, callClose, a)
	}
	return v
}

// record records a payment that the gateway reports. settled says that the order is final by it or was before; the row tells which.
func (g *Gate) record(ctx context.Context, v *verdict, id int64, m Money) (settled, stop bool) {
	result, err := g.store.RecordPayment(ctx, paymentOf(g.cfg.Name, id, m))
	switch {
	case errors.Is(err, orders.ErrPaymentConflict):
		v.doubt = &orders.Doubt{ID: id, Reason: fmt.Sprintf("the gateway reports payment %q, which was recorded before with another order, amount or currency", m.TransactionID)}
		return false, true
	case errors.Is(err, orders.ErrInvalid):
		v.doubt = &orders.Doubt{ID: id, Reason: fmt.Sprintf("the gateway reports a payment that cannot be recorded: %v", err)}
		return false, true
	case err != nil:
		v.err = err
		return false, true
	}
	if !result.Repeated {
		g.metrics.found.WithLabelValues(string(result.Outcome)).Inc()
	}
	return result.Outcome != orders.PaymentMismatch, false
}

func paymentOf(gateway string, id int64, m Money) orders.Payment {
	return orders.Payment{Gateway: gateway, TransactionID: m.TransactionID, OrderID: id, Currency: m.Currency, Amount: m.Amount, PaidAt: m.PaidAt}
}

// doubtful is the doubt after an answer that allows no cancel. Money that came and went back is for a person: the order was paid once, and
// asking again gives the same answer.
func doubtful(id int64, call string, a Answer) *orders.Doubt {
	reason := fmt.Sprintf("the gateway says %s to %s", a.State, call)
	if a.Detail != "" {
		reason += ": " + a.Detail
	}
	return &orders.Doubt{ID: id, Reason: reason, Final: a.State == StateRefunded}
}
