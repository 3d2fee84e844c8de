package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
)

// EventOutbox is what the relay of events needs of the store; *orders.Store has it. Marks give the number of rows that still carried the
// token.
type EventOutbox interface {
	ClaimOutgoing(ctx context.Context, limit int, lease time.Duration) (orders.OutgoingClaim, error)
	MarkOutgoingSent(ctx context.Context, token string, sent []orders.SentOutgoing) (int, error)
	MarkOutgoingRetry(ctx context.Context, token string, ids []int64, pause time.Duration, cause error) (int, error)
	UnclaimOutgoing(ctx context.Context, token string, ids []int64) (int, error)
	ParkOutgoing(ctx context.Context, token string, e orders.Outgoing, reason string, body []byte) (int, error)
}

// EventsConfig has the settings of an [Events]. The zero value of each field means its default.
type EventsConfig struct {
	// Topic of the events; its type must be NORMAL. Default order-events.
	Topic string
	// Source is the attribute of that name in every event, a URI reference that says whose events these are. Default /lapse.
	Source string
	// Lease is how long claimed events belong to this relay. Default 30 s.
	Lease time.Duration
	// SendTimeout cuts off one send; at most half of Lease. Default 5 s.
	SendTimeout time.Duration
	// ClaimLimit is the number of events of one claim, at most 10,000. Default 500.
	ClaimLimit int
	// Senders is the number of events on their way to the broker at once. Default 8.
	Senders int
	// Poll is the pause between claims while there is less to do than a claim would take. Default 100 ms.
	Poll time.Duration
	// BackoffMin and BackoffMax bound the pause of an event whose send failed: doubled with each attempt, with jitter of up to a half.
	// Defaults 200 ms and 30 s.
	BackoffMin, BackoffMax time.Duration
	// PauseMax bounds the pause of the whole relay while broker or database fail; the pause starts at BackoffMin. Default 5 s.
	PauseMax time.Duration
	// StopTimeout bounds how long Run goes on when its context has ended. Default 10 s.
	StopTimeout time.Duration
	// Logger gets what an operator should know, never per event. Default: nil, silent.
	Logger *slog.Logger
	// Registerer gets the metrics lapse_events_*. Several relays may share one. Default: nil, off.
	Registerer prometheus.Registerer
}

// WithDefaults gives the configuration with every zero field replaced by its default.
func (c EventsConfig) WithDefaults() EventsConfig {
	c.Topic = cmp.Or(c.Topic, "order-events")
	c.Source = cmp.Or(c.Source, "/lapse")
	c.Lease = cmp.Or(c.Lease, 30*time.Second)
	c.SendTimeout = cmp.Or(c.SendTimeout, 5*time.Second)
	c.ClaimLimit = cmp.Or(c.ClaimLimit, 500)
	c.Senders = cmp.Or(c.Senders, 8)
	c.Poll = cmp.Or(c.Poll, 100*time.Millisecond)
	c.BackoffMin = cmp.Or(c.BackoffMin, 200*time.Millisecond)
	c.BackoffMax = cmp.Or(c.BackoffMax, 30*time.Second)
	c.PauseMax = cmp.Or(c.PauseMax, 5*time.Second)
	c.StopTimeout = cmp.Or(c.StopTimeout, 10*time.Second)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// validate checks a configuration that has its defaults; the error names every field that is off.
func (c EventsConfig) validate() error {
	var errs []error
	refuse := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	for _, t := range []struct{ name, is string }{{"Topic", c.Topic}, {"Source", c.Source}} {
		refuse(!strings.ContainsAny(t.is, " \t\r\n"), "%s %q has a blank in it", t.name, t.is)
	}
	refuse(c.ClaimLimit >= 1 && c.ClaimLimit <= maxClaimLimit, "ClaimLimit is %d; it must be 1 to %d", c.ClaimLimit, maxClaimLimit)
	refuse(c.Senders >= 1 && c.Senders <= 1024, "Senders is %d; it must be 1 to 1024", c.Senders)
	for _, d := range []struct {
		name string
		is   time.Duration
	}{
		{"Lease", c.Lease}, {"SendTimeout", c.SendTimeout}, {"Poll", c.Poll}, {"BackoffMin", c.BackoffMin}, {"PauseMax", c.PauseMax}, {"StopTimeout", c.StopTimeout},
	} {
		refuse(d.is > 0, "%s is %s; it must be positive", d.name, d.is)
	}
	refuse(c.BackoffMax >= c.BackoffMin, "BackoffMax is %s; it must be at least BackoffMin, %s", c.BackoffMax, c.BackoffMin)
	refuse(c.SendTimeout <= c.Lease/2, "SendTimeout is %s; it must be at most half of Lease, %s: a send has to end before the lease does", c.SendTimeout, c.Lease)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("configuration of the relay of events: %w", err)
	}
	return nil
}

// Events sends what changes with orders to the shop's other systems: one message an event, at least once. An order's event is sent when the
// one before it has been stored by the broker (or parked), so that a topic that keeps its order would show an order's events in sequence; a
// NORMAL topic of several queues does not, and readers go by the attribute sequence.
//
// It is a loop of its own, and not part of [Relay]: nothing is coalesced here, nothing is due, and a backlog of events must not stand before the
// timed messages. Its methods are safe for concurrent use.
type Events struct {
	store   EventOutbox
	sender  Sender
	cfg     EventsConfig
	metrics *eventMetrics

	mu       sync.Mutex // guards what follows, which is for Ready
	running  bool
	storeErr error // why the outbox could not be claimed from
	sendErr  error // why sends are paused
}

// NewEvents makes a relay of events; it does nothing before [Events.Run]. The sender is one of a topic of type NORMAL. The error is one of
// configuration.
func NewEvents(store EventOutbox, sender Sender, cfg EventsConfig) (*Events, error) {
	if store == nil || sender == nil {
		return nil, errors.New("relay of events: an outbox and a sender are needed")
	}
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	m, err := newEventMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register metrics of the relay of events: %w", err)
	}
	return &Events{store: store, sender: sender, cfg: cfg, metrics: m}, nil
}

// OpenEventSender makes a [Sender] of events to one topic, whose type must be NORMAL; otherwise it is as [OpenSender].
func OpenEventSender(cfg RocketMQ, topic string) (*rmq.Producer, error) {
	cfg.TopicType = rmq.TopicNormal
	return rmq.NewProducer(cfg, topic)
}

// Ready is nil while the relay runs, the last claim worked and events can be sent; otherwise it says what is missing.
func (r *Events) Ready() error {
	r.mu.Lock()
	running, storeErr, sendErr := r.running, r.storeErr, r.sendErr
	r.mu.Unlock()
	if !running {
		return ErrStopped
	}
	if err := r.sender.Ready(); err != nil {
		return fmt.Errorf("send events: %w", err)
	}
	if sendErr != nil {
		return fmt.Errorf("events are paused after a failed send: %w", sendErr)
	}
	return storeErr
}

func (r *Events) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

// Run works until ctx ends; then it finishes the sends under way and their marks within StopTimeout, and gives the other events back. What
// cannot be finished in time is left to the lease. Run returns nil then; the only error is [ErrRunning].
func (r *Events) Run(ctx context.Context) error {
	already := false
	r.set(func() {
		already = r.running
		if !already {
			r.running, r.storeErr, r.sendErr = true, errNotAsked, nil
		}
	})
	if already {
		return ErrRunning
	}
	defer r.set(func() { r.running = false })

	// The work outlives ctx by StopTimeout at most.
	work, cutOff := context.WithCancel(context.WithoutCancel(ctx))
	defer cutOff()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(r.cfg.StopTimeout, cutOff) })()

	var t trouble
	paused := false
	defer func() {
		if paused {
			r.metrics.paused.Dec()
		}
	}()
	for {
		pause := r.round(ctx, work, &t)
		switch now := t.unready || t.claims > 0 || t.sends > 0; {
		case now && !paused:
			r.metrics.paused.Inc()
			paused = true
		case !now && paused:
			r.metrics.paused.Dec()
			paused = false
		}
		if !sleep(ctx, pause) {
			return nil
		}
	}
}

// trouble is why a relay of events pauses.
type trouble struct {
	unready       bool // the sender has no connection
	claims, sends int  // failures in a row
	lastSend      time.Time
}

// round claims once and sends what was claimed. It says how long to wait.
func (r *Events) round(ctx, work context.Context, t *trouble) time.Duration {
	if t.unready = r.sender.Ready() != nil; t.unready { // which Ready tells, and the sender logs
		return jittered(min(r.cfg.BackoffMin, askAgain))
	}
	limit := r.cfg.ClaimLimit
	if t.claims > 0 || t.sends > 0 {
		limit = 1 // a probe
	}
	claimedAt := time.Now()
	claimCtx, cancel := context.WithTimeout(work, r.cfg.Lease/3)
	claim, err := r.store.ClaimOutgoing(claimCtx, limit, r.cfg.Lease)
	cancel()
	if err != nil {
		if t.claims++; t.claims == 1 && ctx.Err() == nil {
			r.cfg.Logger.Warn("outbox of events cannot be read, will be tried until it can", "err", err)
		}
		r.set(func() { r.storeErr = err })
		return backoff(r.cfg.BackoffMin, r.cfg.PauseMax, t.claims)
	}
	if t.claims > 0 {
		r.cfg.Logger.Info("outbox of events can be read again", "failures", t.claims)
	}
	t.claims = 0
	r.set(func() { r.storeErr = nil })
	if len(claim.Rows) == 0 {
		// While a send has failed and its event waits, nothing says that the broker is back. Once every event that failed here has been tried again
		// since, or another relay has sent it, there is nothing left to be paused for.
		if t.sends > 0 && time.Since(t.lastSend) > 2*r.cfg.BackoffMax {
			r.goOn(t)
		}
		return jittered(r.cfg.Poll)
	}
	// A send is started only if it can be cut off clearly before the lease ends.
	until := claimedAt.Add(r.cfg.Lease)
	results := r.send(ctx, work, claim, claimedAt, until.Add(-r.cfg.Lease/6-r.cfg.SendTimeout))
	failed := r.mark(work, claim, results, until)
	switch {
	case failed != nil:
		if t.sends++; t.sends == 1 && ctx.Err() == nil {
			r.cfg.Logger.Warn("event was not sent, the relay of events pauses", "err", failed)
		}
		t.lastSend = time.Now()
		r.set(func() { r.sendErr = failed })
		return backoff(r.cfg.BackoffMin, r.cfg.PauseMax, t.sends)
	case t.sends > 0:
		r.goOn(t)
		return 0
	case len(claim.Rows) == limit:
		return 0
	}
	return jittered(r.cfg.Poll)
}

func (r *Events) goOn(t *trouble) {
	r.cfg.Logger.Info("the relay of events goes on", "failures", t.sends)
	r.set(func() { r.sendErr = nil })
	t.sends = 0
}

// sentEvent is what became of one claimed event: neither a message id nor an error says that it was not tried.
type sentEvent struct {
	messageID string
	body      []byte
	err       error
	refused   bool
}

// send sends events side by side until one fails, the lease comes near its end, or ctx ends.
func (r *Events) send(ctx, work context.Context, claim orders.OutgoingClaim, claimedAt, startBy time.Time) []sentEvent {
	results := make([]sentEvent, len(claim.Rows))
	var next atomic.Int64
	var failed atomic.Bool
	var senders sync.WaitGroup
	for range min(r.cfg.Senders, len(claim.Rows)) {
		senders.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(claim.Rows) || failed.Load() || ctx.Err() != nil || !time.Now().Before(startBy) {
					return
				}
				e, s := claim.Rows[i], &results[i]
				if s.body, s.err = e.CloudEvent(r.cfg.Source); s.err != nil {
					s.refused = true // by ourselves: it can never be sent either
					continue
				}
				s.messageID, s.err = r.sendOnce(work, e, s.body)
				s.refused = rmq.IsRefusedMessage(s.err)
				switch {
				case s.err == nil:
					r.metrics.sent.WithLabelValues(e.Type).Inc()
					r.metrics.lag.Observe(max(claim.Now.Sub(e.AvailableAt)+time.Since(claimedAt), 0).Seconds())
				case !s.refused:
					r.metrics.sendFailures.Inc()
					failed.Store(true)
				}
			}
		})
	}
	senders.Wait()
	return results
}

func (r *Events) sendOnce(work context.Context, e orders.Outgoing, body []byte) (string, error) {
	ctx, cancel := context.WithTimeout(work, r.cfg.SendTimeout)
	defer cancel()
	return r.sender.Send(ctx, Message{
		Topic: r.cfg.Topic, Body: body, Keys: []string{orders.FormatID(e.OrderID)},
		Properties: map[string]string{"content-type": orders.OutgoingContentType},
	})
}

// mark writes what became of the events, and gives the error of a send that failed.
func (r *Events) mark(work context.Context, claim orders.OutgoingClaim, results []sentEvent, until time.Time) (failed error) {
	var sent []orders.SentOutgoing
	var untried []int64
	retried := map[int][]int64{} // by attempts
	for i, s := range results {
		e := claim.Rows[i]
		switch {
		case s.err == nil && s.messageID == "":
			untried = append(untried, e.ID)
		case s.err == nil:
			sent = append(sent, orders.SentOutgoing{ID: e.ID, MessageID: s.messageID})
		case s.refused:
			r.metrics.parked.Inc()
			r.cfg.Logger.Error("event is refused for good and parked", "event", e.EventID(), "type", e.Type, "err", s.err)
			r.settle(work, until, "parked", 1, func(ctx context.Context) (int, error) {
				return r.store.ParkOutgoing(ctx, claim.Token, e, fmt.Sprintf("the broker refuses event %s of the order for good: %v", e.Type, s.err), s.body)
			})
		default:
			failed = s.err
			retried[e.Attempts] = append(retried[e.Attempts], e.ID)
		}
	}
	if len(sent) > 0 {
		r.settle(work, until, "sent", len(sent), func(ctx context.Context) (int, error) { return r.store.MarkOutgoingSent(ctx, claim.Token, sent) })
	}
	for attempts, ids := range retried {
		r.settle(work, until, "to be sent again", len(ids), func(ctx context.Context) (int, error) {
			return r.store.MarkOutgoingRetry(ctx, claim.Token, ids, backoff(r.cfg.BackoffMin, r.cfg.BackoffMax, attempts+1), failed)
		})
	}
	if len(untried) > 0 {
		r.settle(work, until, "not sent", len(untried), func(ctx context.Context) (int, error) { return r.store.UnclaimOutgoing(ctx, claim.Token, untried) })
	}
	return failed
}

// settle writes a mark. One that fails is written again as long as the lease lasts: without it the events would be sent once more.
func (r *Events) settle(work context.Context, until time.Time, what string, rows int, write func(context.Context) (int, error)) {
	ctx, cancel := context.WithDeadline(work, until)
	defer cancel()
	for failures := 0; ; {
		n, err := write(ctx)
		if err == nil {
			// After an error the first try may have been committed, and then nothing is left to match.
			if lost := rows - n; lost > 0 && failures == 0 {
				r.metrics.lost.Add(float64(lost))
				r.cfg.Logger.Info("events were no longer leased by this relay; they are sent again", "events", lost, "of", rows, "mark", what)
			}
			return
		}
		failures++
		if !sleep(ctx, backoff(r.cfg.BackoffMin, r.cfg.PauseMax, failures)) {
			r.cfg.Logger.Warn("mark was not written before the lease ended; the events are sent again", "events", rows, "mark", what, "err", err)
			return
		}
	}
}

// eventMetrics are shared by all relays of one registerer.
type eventMetrics struct {
	sent                       *prometheus.CounterVec
	parked, sendFailures, lost prometheus.Counter
	lag                        prometheus.Histogram
	paused                     prometheus.Gauge
}

func newEventMetrics(reg prometheus.Registerer) (*eventMetrics, error) {
	var errs []error
	counter := func(name, help string) prometheus.Counter {
		return register(reg, prometheus.NewCounter(prometheus.CounterOpts{Name: "lapse_events_" + name, Help: help}), &errs)
	}
	m := &eventMetrics{
		sent: register(reg, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lapse_events_sent_total", Help: "Events that the broker stored, by type."}, []string{"type"}), &errs),
		parked:       counter("parked_total", "Events parked since the broker refuses them."),
		sendFailures: counter("send_failures_total", "Sends of events that failed or have an unknown result; refused ones are not among them."),
		lost:         counter("lost_leases_total", "Events that a mark did not match: the lease had ended, and they are sent again."),
		lag: register(reg, prometheus.NewHistogram(prometheus.HistogramOpts{Name: "lapse_events_send_lag_seconds", Help: "From the change of an order to the stored event.",
			Buckets: []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200}}), &errs),
		paused: register(reg, prometheus.NewGauge(prometheus.GaugeOpts{Name: "lapse_events_paused", Help: "Relays of events that are paused since the broker or the database fails."}), &errs),
	}
	for _, kind := range []string{orders.OutgoingPlaced, orders.OutgoingPaid, orders.OutgoingCancelled, orders.OutgoingRefundDone} {
		m.sent.WithLabelValues(kind)
	}
	return m, errors.Join(errs...)
}
