package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/orders"
)

// Canceller cancels what is due. *orders.Store is one; a shop may put its own table behind it, and a gate may wrap it.
type Canceller interface {
	// CancelDue gives one outcome for each id, in the order of the ids. An error means that nothing may be assumed about any of
	// them. For outcomes of not due and held see [orders.Outcome]: up to EarlyWait nothing may have been written, with more the
	// canceller must have seen to it that somebody asks again, since the message is acknowledged then. It is called from several
	// goroutines, and ends when its context does.
	CancelDue(ctx context.Context, ids []string) ([]orders.Outcome, error)
}

// Parker keeps what cannot be handled until somebody looks. *orders.Store is one.
type Parker interface {
	Park(ctx context.Context, p orders.Parked) error
	// Ready says whether Park and the Canceller can work: nil, or what is missing.
	Ready(ctx context.Context) error
}

// Source is where timed messages come from. *Connection is one.
type Source interface {
	// Receive waits some seconds for up to max messages, hidden from others for the invisible time. None: nil, nil.
	Receive(ctx context.Context, max int, invisible time.Duration) ([]*Delivery, error)
	// Ack ends a message. An error means that it comes again.
	Ack(ctx context.Context, d *Delivery) error
	// ChangeInvisible hides a message from others for another while, from now on.
	ChangeInvisible(ctx context.Context, d *Delivery, invisible time.Duration) error
	// Ready is nil when the connection stands, otherwise what is missing.
	Ready() error
}

// Config has the settings of a [Consumer]. The zero value of each field means its default.
type Config struct {
	// BatchOrders is how many orders are cancelled in one transaction, 1 to 500. A payment waits for the whole transaction that
	// holds its order. Default 100.
	BatchOrders int
	// BatchWait is how long orders wait for others to make a batch. Default 20 ms.
	BatchWait time.Duration
	// Workers is how many transactions run at once, beside one for orders that others have locked. More than 2 made the transactions
	// longer and not more of them. Default 2.
	Workers int
	// MaxInHand bounds the orders of the messages that are received and not yet acknowledged: what one kill of the process puts
	// off by the invisible time. It is exceeded by at most one message. Default 2,000.
	MaxInHand int
	// EarlyWait is up to how early an order is waited for. It has to be the canceller's own EarlyWait: an order that the consumer
	// does not wait for and the canceller did not time anew would be lost. A canceller that has a method EarlyWait is asked, and
	// a different value is an error. Default: the canceller's, or 2 s.
	EarlyWait time.Duration
	// Receivers is how many Receives are under way at once. Default 4.
	Receivers int
	// MaxMessages is the most messages of one Receive, 1 to 32. Fewer are asked for when their orders would not fit in MaxInHand.
	// Default 32.
	MaxMessages int
	// Invisible is how long a received message is hidden from the other consumers of the group: how late its orders are when this
	// process is killed. It is renewed while the message is in hand. 10 s to 12 h. Default 60 s.
	Invisible time.Duration
	// CancelTimeout cuts off one transaction, and everything else that is asked of the database. Shorter than Invisible. Default 10 s.
	CancelTimeout time.Duration
	// Ackers is how many acknowledgements are under way at once; each is a request of its own. Default 8.
	Ackers int
	// ShutdownGrace is how long Run goes on after its context has ended, to finish and acknowledge what is in hand. Default 20 s.
	ShutdownGrace time.Duration
	// NewerVersionDelay is how long a message of a newer version is hidden at its first delivery; it doubles with each further one,
	// up to 1 hour. Default 1 minute.
	NewerVersionDelay time.Duration
	// BackoffMin and BackoffMax bound the pauses between two tries of whatever fails; they double and have jitter.
	// Defaults 100 ms and 5 s.
	BackoffMin, BackoffMax time.Duration
	// GiveUpAfter is how long an order is tried that fails for a reason of its own while no other order succeeds. Default 1 minute.
	GiveUpAfter time.Duration
	// Logger gets what happens. Default: nil, silent.
	Logger *slog.Logger
	// Registerer gets the metrics. Several consumers may share one. Default: nil, off.
	Registerer prometheus.Registerer
}

// WithDefaults fills in what is not set.
func (c Config) WithDefaults() Config {
	number := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	duration := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	number(&c.BatchOrders, 100)
	duration(&c.BatchWait, 20*time.Millisecond)
	number(&c.Workers, 2)
	number(&c.MaxInHand, 2000)
	duration(&c.EarlyWait, 2*time.Second)
	number(&c.Receivers, 4)
	number(&c.MaxMessages, 32)
	duration(&c.Invisible, time.Minute)
	duration(&c.CancelTimeout, 10*time.Second)
	number(&c.Ackers, 8)
	duration(&c.ShutdownGrace, 20*time.Second)
	duration(&c.NewerVersionDelay, time.Minute)
	duration(&c.BackoffMin, 100*time.Millisecond)
	duration(&c.BackoffMax, 5*time.Second)
	duration(&c.GiveUpAfter, time.Minute)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// maxNewerVersionDelay is where the doubling of NewerVersionDelay ends.
const maxNewerVersionDelay = time.Hour

func (c Config) validate() error {
	var errs []error
	for _, n := range []struct {
		name          string
		is, low, high int
	}{
		// 500 is what CancelDue does in one transaction, 32 is the proxy's maximum, which it applies in silence.
		{"BatchOrders", c.BatchOrders, 1, 500}, {"Workers", c.Workers, 1, 256}, {"MaxInHand", c.MaxInHand, 1, 1_000_000},
		{"Receivers", c.Receivers, 1, 256}, {"MaxMessages", c.MaxMessages, 1, 32}, {"Ackers", c.Ackers, 1, 256},
	} {
		if n.is < n.low || n.is > n.high {
			errs = append(errs, fmt.Errorf("%s is %d: must be %d to %d", n.name, n.is, n.low, n.high))
		}
	}
	for _, d := range []struct {
		name          string
		is, low, high time.Duration
	}{
		{"BatchWait", c.BatchWait, 1, time.Second}, {"EarlyWait", c.EarlyWait, 1, time.Minute},
		{"Invisible", c.Invisible, 10 * time.Second, 12 * time.Hour}, // the proxy's limits (40011 otherwise)
		{"CancelTimeout", c.CancelTimeout, 100 * time.Millisecond, c.Invisible - 1},
		{"ShutdownGrace", c.ShutdownGrace, 1, time.Hour}, {"NewerVersionDelay", c.NewerVersionDelay, time.Second, maxNewerVersionDelay},
		{"BackoffMin", c.BackoffMin, 1, c.BackoffMax}, {"BackoffMax", c.BackoffMax, 1, time.Hour},
		{"GiveUpAfter", c.GiveUpAfter, 1, 24 * time.Hour},
	} {
		if d.is < d.low || d.is > d.high {
			errs = append(errs, fmt.Errorf("%s is %s: must be %s to %s", d.name, d.is, d.low, d.high))
		}
	}
	return errors.Join(errs...)
}

// Consumer takes timed messages from a source and has their orders cancelled. It is safe for concurrent use.
type Consumer struct {
	cfg       Config
	canceller Canceller
	parker    Parker
	source    Source
	metrics   *metrics
	log       *slog.Logger
	decode    func([]byte) (orders.Expiry, error)
	ran       atomic.Bool
	deaf      atomic.Bool   // the last Receive of any receiver failed; so that the receivers say it once, not each
	acks      chan *message // finished; never full, since a message in hand has at least one order

	mu        sync.Mutex    // guards everything below
	changed   chan struct{} // closed and replaced when a waiting goroutine may find something to do
	draining  bool          // no further Receive is begun
	stopped   bool          // nothing more will be begun
	messages  map[*message]struct{}
	inHand    int     // orders of messages
	reserved  int     // orders that the Receives under way may bring
	guess     float64 // orders of a message, what is reserved for one
	ready     []*task // to be done now, oldest first
	slow      []*task // likewise, of locked orders
	waiting   taskHeap
	paused    error // why no message is received and nothing is asked; nil: at work
	since     time.Time
	pauses    int       // since something succeeded
	succeeded time.Time // when the last transaction of cancels did
}

// New makes a consumer; it does nothing before Run. The errors are those of the configuration.
func New(canceller Canceller, parker Parker, source Source, cfg Config) (*Consumer, error) {
	if canceller == nil || parker == nil || source == nil {
		return nil, errors.New("new consumer: canceller, parker and source are required")
	}
	if c, ok := canceller.(interface{ EarlyWait() time.Duration }); ok {
		switch own := c.EarlyWait(); cfg.EarlyWait {
		case 0, own:
			cfg.EarlyWait = own
		default:
			return nil, fmt.Errorf("new consumer: EarlyWait is %s and the canceller's is %s: give both the same", cfg.EarlyWait, own)
		}
	}
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("new consumer: %w", err)
	}
	m, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("new consumer: register metrics: %w", err)
	}
	return &Consumer{
		cfg: cfg, canceller: canceller, parker: parker, source: source, metrics: m, log: cfg.Logger,
		decode:   orders.DecodeExpiry,
		acks:     make(chan *message, cfg.MaxInHand+1),
		changed:  make(chan struct{}),
		messages: make(map[*message]struct{}),
		// Nothing is known of the messages: every receiver may ask for one.
		guess:  float64(max(1, cfg.MaxInHand/cfg.Receivers)),
		paused: errStarting,
		since:  time.Now(),
	}, nil
}

var (
	errStarting = errors.New("the database has not answered yet")
	errNotRun   = errors.New("the consumer does not run")
	errRunTwice = errors.New("run consumer: it has run before; make another one")
)

// Ready is nil while messages are received and worked off; otherwise it says what is missing: the connection to RocketMQ, the
// database, or Run itself.
func (c *Consumer) Ready() error {
	var errs []error
	if err := c.source.Ready(); err != nil {
		errs = append(errs, err)
	}
	c.mu.Lock()
	paused, since, over := c.paused, c.since, c.draining
	c.mu.Unlock()
	switch {
	case !c.ran.Load() || over:
		errs = append(errs, errNotRun)
	case paused != nil:
		errs = append(errs, fmt.Errorf("the consumer is paused since %s: %w", since.UTC().Format(time.RFC3339), paused))
	}
	return errors.Join(errs...)
}

// Run works until ctx ends. It then begins no Receive, finishes and acknowledges within ShutdownGrace what is in hand and what the
// Receives under way still bring (they are not cut off: an idle one takes the seconds of its long poll), makes the rest visible again
// for the other consumers, and returns nil. It waits for the database and the broker for as long as it takes. An error is returned only
// when something did not end in time (a Canceller that ignores its context) or Run is called twice.
//
// Close the source, then the database, after Run has returned.
func (c *Consumer) Run(ctx context.Context) error {
	if c.ran.Swap(true) {
		return errRunTwice
	}
	// What is in hand outlives ctx.
	hard, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()

	var receivers, others sync.WaitGroup
	for range c.cfg.Receivers {
		receivers.Go(func() { c.receive(ctx, hard) }) // ends with ctx and the Receive that is under way then
	}
	// The others end with hard, and the workers after what they are doing.
	for range c.cfg.Workers {
		others.Go(func() { c.work(hard, false) })
	}
	others.Go(func() { c.work(hard, true) })
	for range c.cfg.Ackers {
		others.Go(func() { c.acknowledge(hard) })
	}
	others.Go(func() { c.renew(hard) })
	others.Go(func() { c.keep(hard) })

	<-ctx.Done()
	begun := time.Now()
	// The last part of the grace is for handing back what could not be finished.
	end := time.NewTimer(c.cfg.ShutdownGrace - min(c.cfg.ShutdownGrace/4, handBackTime))
	defer end.Stop()
	c.set(func() { c.draining = true })
	c.await(end.C, func() bool { return c.idle() })
	c.set(func() { c.stopped = true })
	stop()

	ended := make(chan struct{})
	go func() { // ends with the last of them
		receivers.Wait()
		others.Wait()
		close(ended)
	}()
	var err error
	grace := time.NewTimer(max(time.Until(begun.Add(c.cfg.ShutdownGrace)), handBackTime))
	defer grace.Stop()
	select {
	case <-ended:
	case <-grace.C:
		err = fmt.Errorf("stop consumer: something did not end within %s; its messages come again", c.cfg.ShutdownGrace)
	}
	if left := c.handBackAll(); left > 0 {
		c.log.Warn("stopped with messages in hand; they come again", "messages", left)
	}
	return err
}

// set changes what mu guards, and wakes whoever waits for it.
func (c *Consumer) set(change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
	c.wake()
}

// wake lets every waiting goroutine look again. It must be called with mu held.
func (c *Consumer) wake() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// await waits until cond, which is called with mu held, is true, or until end fires; it returns the last answer of cond.
func (c *Consumer) await(end <-chan time.Time, cond func() bool) bool {
	for {
		c.mu.Lock()
		ok, changed := cond(), c.changed
		c.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-changed:
		case <-end:
			return false
		}
	}
}

// idle says that nothing is in hand and nothing can come any more. It must be called with mu held.
func (c *Consumer) idle() bool { return len(c.messages) == 0 && c.reserved == 0 }
