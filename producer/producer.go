package producer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"gorm.io/gorm"

	"github.com/lapse-orders/lapse/orders"
)

// The types of package orders, under the names that a checkout meets them by.
type (
	// NewOrder is what is placed.
	NewOrder = orders.NewOrder
	// Order is what is stored.
	Order = orders.Order
	// Item is a line of an order.
	Item = orders.Item
	// Payment is a gateway's notice.
	Payment = orders.Payment
	// PaymentResult is what the money did.
	PaymentResult = orders.PaymentResult
	// Extension is what became of a wish for more time.
	Extension = orders.Extension
	// Outcome is what became of an order in a cancel.
	Outcome = orders.Outcome
	// Policy says how long the orders of a channel and a payment method may stay unpaid.
	Policy = orders.Policy
)

// ParsePolicies reads policies from text, in the form of the key orders.policies: one a line, or separated by semicolons.
func ParsePolicies(text string) ([]Policy, error) { return orders.ParsePolicies(text) }

// Config has the settings of a [Client]. The zero value of each field means its default.
type Config struct {
	// Timeout is the time from placing to the deadline, for orders that name none. Default 30 minutes.
	Timeout time.Duration
	// Policies give other timeouts, or none, to orders of some channels and payment methods; the first that fits holds.
	// [ParsePolicies] reads them from text. Default: none.
	Policies []Policy
	// Events makes every change of an order's state also write an event, which a relay with events.topic sends (docs/events.md). It
	// has to be on in every process that works on orders, or in none. Default false.
	Events bool
	// MaxLifetime caps every deadline, also an extended one, at this long after placing. Default 7 days.
	MaxLifetime time.Duration
	// CloseOnCancel has the payment page of an order closed that is cancelled by hand: lapse refund does it, so that has to run. Default: off.
	CloseOnCancel bool
	// MaxOpenConns bounds the pool that [Open] makes. Default 16.
	MaxOpenConns int
	// Registerer takes the metrics lapse_orders_placed_total, lapse_orders_refused_total, lapse_payments_total and
	// lapse_place_duration_seconds. Two clients need two registries, or wrapped ones. Default: off.
	Registerer prometheus.Registerer
}

// Client is safe for concurrent use.
type Client struct {
	store    *orders.Store
	placed   prometheus.Counter
	refused  *prometheus.CounterVec
	payments *prometheus.CounterVec
	duration prometheus.Histogram
}

// Open makes a client with a pool of its own, from a DSN as user:password@tcp(host:port)/database. It checks its arguments and dials
// nothing: the first verb does. Close it after the last verb.
func Open(dsn string, cfg Config) (*Client, error) {
	store, err := orders.Open(dsn, cfg.orders())
	if err != nil {
		return nil, err
	}
	c, err := newClient(store, cfg.Registerer)
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return c, nil
}

// New makes a client on the shop's own gorm handle, whose pool the verbs without Tx then use. The handle's settings (logger, naming,
// hooks, prepared statements) do not matter and are not touched. Close leaves the pool open.
func New(db *gorm.DB, cfg Config) (*Client, error) {
	store, err := orders.New(db, cfg.orders())
	if err != nil {
		return nil, err
	}
	return newClient(store, cfg.Registerer)
}

func (c Config) orders() orders.Config {
	return orders.Config{Timeout: c.Timeout, Policies: c.Policies, Events: c.Events, MaxLifetime: c.MaxLifetime, CloseOnCancel: c.CloseOnCancel, MaxOpenConns: c.MaxOpenConns}
}

func newClient(store *orders.Store, registerer prometheus.Registerer) (*Client, error) {
	c := &Client{
		store:  store,
		placed: prometheus.NewCounter(prometheus.CounterOpts{Name: "lapse_orders_placed_total", Help: "Orders placed. In a caller's transaction they count before its commit."}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_orders_refused_total",
			Help: "Orders that were not placed, by reason: out_of_stock, unknown_sku, invalid, exists, error."}, []string{"reason"}),
		payments: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lapse_payments_total",
			Help: "Payments recorded, by outcome: accepted, duplicate, late, mismatch; notices that came again: repeated."}, []string{"outcome"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "lapse_place_duration_seconds", Help: "Time to place an order, its retries included.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14)}),
	}
	for _, reason := range []string{"out_of_stock", "unknown_sku", "invalid", "exists", "error"} {
		c.refused.WithLabelValues(reason)
	}
	for _, outcome := range []orders.PaymentOutcome{orders.PaymentAccepted, orders.PaymentDuplicate, orders.PaymentLate, orders.PaymentMismatch, "repeated"} {
		c.payments.WithLabelValues(string(outcome))
	}
	if registerer == nil {
		return c, nil
	}
	for _, m := range []prometheus.Collector{c.placed, c.refused, c.payments, c.duration} {
		if err := registerer.Register(m); err != nil {
			return nil, fmt.Errorf("register metrics of the producer: %w", err)
		}
	}
	return c, nil
}

// Ready asks whether the verbs can work: the database is reachable, writable, and has the tables. A checkout's readiness should not
// depend on anything else of lapse.
func (c *Client) Ready(ctx context.Context) error { return c.store.Ready(ctx) }

// Close closes the pool of a client from [Open].
func (c *Client) Close() error { return c.store.Close() }

// PlaceOrder commits an order, its reservation and its outbox row. Errors: those of [orders.Store.Place].
func (c *Client) PlaceOrder(ctx context.Context, n NewOrder) (Order, error) {
	start := time.Now()
	o, err := c.store.Place(ctx, n)
	return o, c.count(start, err)
}

// PlaceOrderTx is PlaceOrder in the caller's transaction. When the caller rolls back, no message is sent.
func (c *Client) PlaceOrderTx(ctx context.Context, tx *gorm.DB, n NewOrder) (Order, error) {
	start := time.Now()
	o, err := c.store.PlaceTx(ctx, tx, n)
	return o, c.count(start, err)
}

func (c *Client) count(start time.Time, err error) error {
	c.duration.Observe(time.Since(start).Seconds())
	switch {
	case err == nil:
		c.placed.Inc()
	case errors.Is(err, orders.ErrOutOfStock):
		c.refused.WithLabelValues("out_of_stock").Inc()
	case errors.Is(err, orders.ErrUnknownSKU):
		c.refused.WithLabelValues("unknown_sku").Inc()
	case errors.Is(err, orders.ErrInvalid):
		c.refused.WithLabelValues("invalid").Inc()
	case errors.Is(err, orders.ErrExists):
		c.refused.WithLabelValues("exists").Inc()
	default:
		c.refused.WithLabelValues("error").Inc()
	}
	return err
}

// RecordPayment records a gateway's notice: the order becomes paid, or the money gets its refund record. The same notice again gives
// the first result. Errors: those of [orders.Store.RecordPayment]; answer the gateway with failure on every one, so that it asks again.
func (c *Client) RecordPayment(ctx context.Context, p Payment) (PaymentResult, error) {
	result, err := c.store.RecordPayment(ctx, p)
	return result, c.countPayment(result, err)
}

// RecordPaymentTx is RecordPayment in the caller's transaction.
func (c *Client) RecordPaymentTx(ctx context.Context, tx *gorm.DB, p Payment) (PaymentResult, error) {
	result, err := c.store.RecordPaymentTx(ctx, tx, p)
	return result, c.countPayment(result, err)
}

func (c *Client) countPayment(result PaymentResult, err error) error {
	switch {
	case err != nil:
	case result.Repeated:
		c.payments.WithLabelValues("repeated").Inc()
	default:
		c.payments.WithLabelValues(string(result.Outcome)).Inc()
	}
	return err
}

// ExtendDeadline moves the deadline of an unpaid order to a later instant. Errors: those of [orders.Store.ExtendDeadline].
func (c *Client) ExtendDeadline(ctx context.Context, id int64, until time.Time, actor string) (Extension, error) {
	return c.store.ExtendDeadline(ctx, id, until, actor)
}

// ExtendDeadlineTx is ExtendDeadline in the caller's transaction.
func (c *Client) ExtendDeadlineTx(ctx context.Context, tx *gorm.DB, id int64, until time.Time, actor string) (Extension, error) {
	return c.store.ExtendDeadlineTx(ctx, tx, id, until, actor)
}

// Cancel cancels an unpaid order by hand and releases its stock. Errors: those of [orders.Store.Cancel].
func (c *Client) Cancel(ctx context.Context, id int64, actor, reason string) (Outcome, error) {
	return c.store.Cancel(ctx, id, actor, reason)
}

// CancelTx is Cancel in the caller's transaction.
func (c *Client) CancelTx(ctx context.Context, tx *gorm.DB, id int64, actor, reason string) (Outcome, error) {
	return c.store.CancelTx(ctx, tx, id, actor, reason)
}

// Get reads an order; [orders.ErrNotFound] where there is none.
func (c *Client) Get(ctx context.Context, id int64) (Order, error) { return c.store.Get(ctx, id) }

// IsRetryable reports whether the caller of a …Tx function should roll back its transaction and run it again from the start: the
// database broke a deadlock, or a lock was not to be had in time.
func IsRetryable(err error) bool { return orders.IsRetryable(err) }
