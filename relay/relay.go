package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
)

// Outbox is what a relay needs of the store; *orders.Store has it, and its documentation says what each verb does. Marks give the
// number of rows that still carried the token.
type Outbox interface {
	ClaimOutbox(ctx context.Context, limit int, lease time.Duration) (orders.Claim, error)
	MarkSent(ctx context.Context, token string, messages []orders.Sent) (int, error)
	MarkRetry(ctx context.Context, token string, ids []int64, pause time.Duration, cause error) (int, error)
	MarkParked(ctx context.Context, token string, ids []int64, reason string) (int, error)
	Unclaim(ctx context.Context, token string, ids []int64) (int, error)
	PurgeOutbox(ctx context.Context, limit int) (int, error)
}

// Sender stores timed messages at a broker. Send returns when its context ends, at the latest; an error means that the message may or
// may not have been stored, except a refusal of this one message. Ready says why nothing should be sent now. Both are called
// concurrently. [OpenSender] makes one for RocketMQ.
type Sender interface {
	Send(ctx context.Context, m Message) (messageID string, err error)
	Ready() error
}

// Message is a timed message as a [Sender] gets it.
type Message = rmq.Message

// RocketMQ says how to reach the broker, for [OpenSender].
type RocketMQ = rmq.Config

// OpenSender makes a Sender of timed messages to one topic of a RocketMQ 5 broker. It dials nothing: it connects in the background
// until it succeeds, and Ready says what is missing. The error is one of configuration. Close it when no relay uses it any longer.
func OpenSender(cfg RocketMQ, topic string) (*rmq.Producer, error) {
	return rmq.NewProducer(cfg, topic)
}

var (
	// ErrRunning is returned by Run where it runs already.
	ErrRunning = errors.New("the relay is running already")
	// ErrStopped is returned by Ready where the relay does not run, or is stopping.
	ErrStopped = errors.New("the relay does not run")

	errNotAsked = errors.New("the outbox was not asked yet")
)

// Relay sends the timed messages of an outbox. Its methods are safe for concurrent use.
type Relay struct {
	store   Outbox
	sender  Sender
	cfg     Config
	metrics *metrics

	mu       sync.Mutex // guards what follows, which is for Ready
	running  bool
	stopping bool
	storeErr error // why the outbox could not be claimed from, nil when the last claim worked
	sendErr  error // why sends are paused
}

// New makes a relay; it does nothing before [Relay.Run]. The error is one of configuration.
func New(store Outbox, sender Sender, cfg Config) (*Relay, error) {
	if store == nil || sender == nil {
		return nil, errors.New("relay: an outbox and a sender are needed")
	}
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	m, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register metrics of the relay: %w", err)
	}
	return &Relay{store: store, sender: sender, cfg: cfg, metrics: m}, nil
}

// Ready is nil while the relay runs, the last claim worked and messages can be sent; otherwise it says what is missing.
func (r *Relay) Ready() error {
	r.mu.Lock()
	running, storeErr, sendErr := r.running && !r.stopping, r.storeErr, r.sendErr
	r.mu.Unlock()
	if !running {
		return ErrStopped
	}
	if err := r.sender.Ready(); err != nil {
		return fmt.Errorf("send timed messages: %w", err)
	}
	if sendErr != nil {
		return fmt.Errorf("the relay is paused after a failed send: %w", sendErr)
	}
	return storeErr
}

func (r *Relay) setStoreErr(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.storeErr = err
}

func (r *Relay) setStopping() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopping = true
}

func (r *Relay) setSendErr(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sendErr = err
}

// Run works until ctx ends, and then stops in order within StopTimeout: it claims nothing more, finishes the sends under way and their
// marks, and gives the other rows back. What cannot be finished in time is left to the leases. Run returns nil then; the only error is
// [ErrRunning]. It may be called again after it has returned.
func (r *Relay) Run(ctx context.Context) error {
	r.mu.Lock()
	if r.running {
		r.mu.Unlock()
		return ErrRunning
	}
	r.running, r.stopping, r.storeErr, r.sendErr = true, false, errNotAsked, nil
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.running = false
		r.mu.Unlock()
	}()

	// The work outlives ctx by StopTimeout at most: a claim or a send that is cut off leaves rows to their lease.
	work, cutOff := context.WithCancel(context.WithoutCancel(ctx))
	defer cutOff()
	h := newHub(r)

	// All of these end when the hub closes the channels that feed them; the purge, when ctx ends.
	var senders, others sync.WaitGroup
	for range r.cfg.Senders {
		senders.Go(func() { r.send(work, h) })
	}
	for range r.cfg.Markers {
		others.Go(func() { r.mark(work, h) })
	}
	for range r.cfg.Claimers {
		others.Go(func() { r.claim(work, h) })
	}
	if r.cfg.PurgeInterval > 0 {
		others.Go(func() { r.purge(ctx) })
	}
	h.run(ctx, cutOff)
	close(h.wanted)
	close(h.out)
	senders.Wait()
	close(h.marks)
	others.Wait()
	return nil
}

// claimed is what became of one claim. The instants are local, from before the database was asked.
type claimed struct {
	orders.Claim
	limit int
	start time.Time
	err   error
}

// claim claims rows when the hub asks for them.
func (r *Relay) claim(work context.Context, h *hub) {
	for limit := range h.wanted {
		c := claimed{limit: limit, start: time.Now()}
		// Rows that come later than this could hardly be sent before their lease ends.
		ctx, cancel := context.WithTimeout(work, r.cfg.Lease/3)
		c.Claim, c.err = r.store.ClaimOutbox(ctx, limit, r.cfg.Lease)
		cancel()
		if len(c.Rows) > 0 {
			r.metrics.claimSeconds.Observe(time.Since(c.start).Seconds())
		}
		h.claims <- c
	}
}

// purge deletes old rows until ctx ends.
func (r *Relay) purge(ctx context.Context) {
	for {
		// Not at the start and with jitter: several relays would read the same rows.
		if !sleep(ctx, jittered(r.cfg.PurgeInterval)) {
			return
		}
		total := 0
		for {
			n, err := r.store.PurgeOutbox(ctx, r.cfg.PurgeBatch)
			if err != nil && ctx.Err() == nil {
				r.cfg.Logger.Warn("outbox was not purged, will be tried again", "err", err)
			}
			r.metrics.purged.Add(float64(n))
			total += n
			// A short batch may have had rows of open orders in it, so only an empty one is the end.
			if n == 0 || err != nil {
				break
			}
		}
		if total > 0 {
			r.cfg.Logger.Info("purged outbox rows", "rows", total)
		}
	}
}

// backoff is the pause after so many failures: doubled each time, with jitter of up to a half.
func backoff(low, high time.Duration, failures int) time.Duration {
	d := low
	for range failures - 1 {
		if d >= high/2 {
			d = high
			break
		}
		d *= 2
	}
	return jittered(min(d, high))
}

func jittered(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) } //nolint:gosec // jitter needs no secrecy

// sleep reports whether d has passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
