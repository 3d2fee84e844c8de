package payments

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/orders"
)

// Ledger is what the worker needs of the store; *orders.Store has it, and its documentation says what each verb does. Marks are false where
// the lease was lost.
type Ledger interface {
	ClaimRefunds(ctx context.Context, gateway string, limit int, lease time.Duration) (orders.RefundClaim, error)
	RefundDone(ctx context.Context, token string, r orders.PendingRefund, gatewayRefundID string) (bool, error)
	RefundRetry(ctx context.Context, token string, r orders.PendingRefund, pause time.Duration, cause error) (bool, error)
	RefundGivenUp(ctx context.Context, token string, r orders.PendingRefund, reason string) (bool, error)
	ClaimTasks(ctx context.Context, limit int, lease time.Duration) (orders.TaskClaim, error)
	TaskDone(ctx context.Context, token string, task orders.Task, answer string) (bool, error)
	TaskGivenUp(ctx context.Context, token string, task orders.Task, answer, reason string) (bool, error)
	TaskRetry(ctx context.Context, token string, task orders.Task, pause time.Duration, cause error) (bool, error)
	RecordPayment(ctx context.Context, p orders.Payment) (orders.PaymentResult, error)
	Owed(ctx context.Context) (orders.Owed, error)
}

// WorkerConfig has the settings of a [Worker]. The zero value of each field means its default.
type WorkerConfig struct {
	// Name is the gateway's, as for [GateConfig]. Refunds of another gateway's money are left to the worker that has its name. Required.
	Name string
	// Batch is how many refunds, and how many tasks, are claimed and worked on at once, at most 500. Default 16.
	Batch int
	// Lease is how long claimed rows belong to this worker; the work on a row is cut off at half of it. When the worker is killed, another
	// does the rows after this. Default 1 minute.
	Lease time.Duration
	// Poll is the pause between claims while there is less to do than a claim would take. Default 1 s.
	Poll time.Duration
	// BackoffMin and BackoffMax bound the pause of a row that was not done: doubled with each attempt, with jitter of up to a half.
	// Defaults 1 s and 10 minutes.
	BackoffMin, BackoffMax time.Duration
	// MaxAttempts is how often a refund is tried before it is given up and parked. A close is repeated until it is answered. Default
	// 450, some three days with the default pauses.
	MaxAttempts int
	// StopTimeout bounds how long Run goes on when its context has ended. Default 10 s.
	StopTimeout time.Duration
	// Logger gets what an operator should know. Default: nil, silent.
	Logger *slog.Logger
	// Registerer gets the metrics lapse_refund*. Several workers may share one. Default: nil, off.
	Registerer prometheus.Registerer
}

// WithDefaults fills in what is not set.
func (c WorkerConfig) WithDefaults() WorkerConfig {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.Lease, time.Minute)
	def(&c.Poll, time.Second)
	def(&c.BackoffMin, time.Second)
	def(&c.BackoffMax, 10*time.Minute)
	def(&c.StopTimeout, 10*time.Second)
	if c.Batch == 0 {
		c.Batch = 16
	}
	if c.MaxAttempts == 0 {
		c.MaxAttempts = 450
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c WorkerConfig) validate() error {
	switch {
	case c.Name == "":
		return errors.New("the gateway has no name: its refunds are found by it")
	case c.Batch < 1 || c.Batch > 500:
		return fmt.Errorf("batch %d: must be 1 to 500", c.Batch)
	case c.Lease <= 0 || c.Poll <= 0 || c.BackoffMin <= 0 || c.StopTimeout <= 0:
		return fmt.Errorf("lease %s, poll %s, least backoff %s, stop time-out %s: all must be positive", c.Lease, c.Poll, c.BackoffMin, c.StopTimeout)
	case c.BackoffMax < c.BackoffMin:
		return fmt.Errorf("backoff of at least %s and at most %s: the first must not be more", c.BackoffMin, c.BackoffMax)
	case c.MaxAttempts < 1:
		return fmt.Errorf("max attempts %d: must be positive", c.MaxAttempts)
	}
	return nil
}

var (
	// ErrRunning is returned by Run where it runs already.
	ErrRunning = errors.New("the refund worker is running already")
	// ErrStopped is returned by Ready where the worker does not run.
	ErrStopped = errors.New("the refund worker does not run")

	errNotClaimed = errors.New("nothing was claimed yet")
)

// Worker makes refunds, and repeats closes that got no answer. Several may run on one database, in one process or in many.
type Worker struct {
	ledger  Ledger
	gateway Gateway
	cfg     WorkerConfig
	metrics *workerMetrics

	mu      sync.Mutex // guards what follows, which is for Ready
	running bool
	failed  map[string]error // why the last claim of a kind failed
}

// NewWorker makes a worker; it does nothing before [Worker.Run]. The errors are those of the configuration.
func NewWorker(ledger Ledger, gateway Gateway, cfg WorkerConfig) (*Worker, error) {
	if ledger == nil || gateway == nil {
		return nil, errors.New("new refund worker: a store and a gateway are needed")
	}
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("new refund worker: %w", err)
	}
	m, err := newWorkerMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register metrics of the refund worker: %w", err)
	}
	return &Worker{ledger: ledger, gateway: gateway, cfg: cfg, metrics: m, failed: map[string]error{}}, nil
}

// Ready is nil while the worker runs and its last claims worked; otherwise it says what is missing.
func (w *Worker) Ready() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.running {
		return ErrStopped
	}
	return errors.Join(w.failed[kindRefund], w.failed[kindTask])
}

// markTime is how long the mark of a row may take whose call got no answer. It outlives the call, and so must not keep the process from ending.
const markTime = 5 * time.Second

// The two things that a worker works on, as its metrics and its log name them.
const (
	kindRefund = "refund"
	kindTask   = "task"
)

// Run works until ctx ends; then it claims nothing more, and finishes what it has in hand within StopTimeout. What it cannot finish is left to
// the leases. The only error is [ErrRunning]. It may be called again after it has returned.
func (w *Worker) Run(ctx context.Context) error {
	w.mu.Lock()
	if w.running {
		w.mu.Unlock()
		return ErrRunning
	}
	w.running = true
	w.failed = map[string]error{kindRefund: errNotClaimed, kindTask: errNotClaimed}
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		w.running = false
		w.mu.Unlock()
	}()

	work, cutOff := context.WithCancel(context.WithoutCancel(ctx))
	defer cutOff()
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(w.cfg.StopTimeout, cutOff)
		context.AfterFunc(work, func() { timer.Stop() })
	})
	defer stop()

	var loops sync.WaitGroup
	// All end with ctx and what is in hand.
	loops.Go(func() { w.loop(ctx, kindRefund, func() (int, error) { return w.refunds(work) }) })
	loops.Go(func() { w.loop(ctx, kindTask, func() (int, error) { return w.tasks(work) }) })
	loops.Go(func() { w.measure(ctx) })
	loops.Wait()
	return nil
}

// loop claims and works until ctx ends.
func (w *Worker) loop(ctx context.Context, kind string, once func() (int, error)) {
	failures := 0
	for ctx.Err() == nil {
		n, err := once()
		w.mu.Lock()
		w.failed[kind] = err
		w.mu.Unlock()
		pause := jittered(w.cfg.Poll)
		switch {
		case err != nil:
			if failures++; failures == 1 && ctx.Err() == nil {
				w.cfg.Logger.Warn("what is to be done at the gateway cannot be read, will be tried until it can", "kind", kind, "err", err)
			}
			pause = w.backoff(failures, 5*time.Second)
		case failures > 0:
			w.cfg.Logger.Info("what is to be done at the gateway can be read again", "kind", kind, "failures", failures)
			failures = 0
		case n == w.cfg.Batch:
			pause = 0
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
		case <-timer.C:
		}
	}
}

// refunds claims refunds, makes them side by side, and says how many were claimed.
func (w *Worker) refunds(ctx context.Context) (int, error) {
	claim, err := w.ledger.ClaimRefunds(ctx, w.cfg.Name, w.cfg.Batch, w.cfg.Lease)
	if err != nil {
		return 0, err
	}
	var group sync.WaitGroup
	for _, r := range claim.Rows {
		group.Go(func() { w.refund(ctx, claim.Token, r) }) // ends at half of the lease
	}
	group.Wait()
	return len(claim.Rows), nil
}

func (w *Worker) refund(ctx context.Context, token string, r orders.PendingRefund) {
	ctx, cancel := context.WithTimeout(ctx, w.cfg.Lease/2)
	defer cancel()
	result, held, err := w.makeRefund(ctx, token, r)
	w.report(kindRefund, result, held, err, "payment", r.Ref(), "order", r.OrderID)
}

// makeRefund makes one refund, and marks it. Between any two of its steps the process may end: the row is pending then, and whoever claims it
// next sends the same key.
func (w *Worker) makeRefund(ctx context.Context, token string, r orders.PendingRefund) (result string, held bool, err error) {
	a, failure := w.gateway.Refund(ctx, RefundKey(r.Gateway, r.TransactionID), r)
	if failure == nil {
		switch a.State {
		case RefundDone:
			held, err = w.ledger.RefundDone(ctx, token, r, a.RefundID)
			return resultDone, held, err
		case RefundRefused:
			held, err = w.ledger.RefundGivenUp(ctx, token, r, "the gateway refuses it: "+a.Detail)
			return resultGivenUp, held, err
		case RefundPending:
			failure = errors.New("the gateway says pending: " + a.Detail)
		default:
			failure = fmt.Errorf("the gateway says %q, which this build does not know", a.State)
		}
	}
	attempts := r.Attempts + 1
	// The mark has time of its own: a call that took all of it is the case that has to be recorded.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(w.cfg.Lease/4, markTime))
	defer cancel()
	if attempts >= w.cfg.MaxAttempts {
		held, err = w.ledger.RefundGivenUp(ctx, token, r, fmt.Sprintf("tried %d times, the last time: %v", attempts, failure))
		return resultGivenUp, held, err
	}
	held, err = w.ledger.RefundRetry(ctx, token, r, w.backoff(attempts, w.cfg.BackoffMax), failure)
	return resultRetry, held, err
}

// tasks claims tasks, works on them side by side, and says how many were claimed.
func (w *Worker) tasks(ctx context.Context) (int, error) {
	claim, err := w.ledger.ClaimTasks(ctx, w.cfg.Batch, w.cfg.Lease)
	if err != nil {
		return 0, err
	}
	var group sync.WaitGroup
	for _, task := range claim.Rows {
		group.Go(func() { w.task(ctx, claim.Token, task) }) // ends at half of the lease
	}
	group.Wait()
	return len(claim.Rows), nil
}

func (w *Worker) task(ctx context.Context, token string, task orders.Task) {
	ctx, cancel := context.WithTimeout(ctx, w.cfg.Lease/2)
	defer cancel()
	what := []any{"task", task.Kind, "order", task.OrderID}
	answer, failure := w.close(ctx, task)
	switch {
	case failure == nil:
		held, err := w.ledger.TaskDone(ctx, token, task, answer)
		w.report(kindTask, resultDone, held, err, what...)
		return
	// The gateway has answered, and what it says of the money is refused for good: asked again, it would say the same for ever. The task would
	// keep its order from being purged, and undo what a person has decided, as often as it were done.
	case errors.Is(failure, orders.ErrPaymentConflict):
		// Recording it has parked the payment.
		held, err := w.ledger.TaskDone(ctx, token, task, fmt.Sprintf("%s (conflict): %v", StatePaid, failure))
		w.report(kindTask, resultGivenUp, held, err, append(what, "reason", failure)...)
		return
	case errors.Is(failure, orders.ErrInvalid):
		held, err := w.ledger.TaskGivenUp(ctx, token, task, fmt.Sprintf("%s (invalid): %v", StatePaid, failure),
			fmt.Sprintf("the gateway reports a payment that cannot be recorded: %v", failure))
		w.report(kindTask, resultGivenUp, held, err, append(what, "reason", failure)...)
		return
	}
	ctx, cancelMark := context.WithTimeout(context.WithoutCancel(ctx), min(w.cfg.Lease/4, markTime))
	defer cancelMark()
	held, err := w.ledger.TaskRetry(ctx, token, task, w.backoff(task.Attempts+1, w.cfg.BackoffMax), failure)
	w.report(kindTask, resultRetry, held, err, what...)
}

// close closes the payment page of an order, whatever became of the order meanwhile, and gives the answer that ends the task. Money that it
// brings to light is recorded: the order becomes paid, or the money has its refund. orders.ErrPaymentConflict and orders.ErrInvalid say that it
// cannot be, now or later.
func (w *Worker) close(ctx context.Context, task orders.Task) (answer string, err error) {
	a, err := w.gateway.Close(ctx, task.OrderID)
	if err != nil {
		return "", err
	}
	switch a.State {
	case StateClosed, StateAlreadyClosed, StateNone, StateRefunded:
		return string(a.State), nil
	case StatePaid:
		result, err := w.ledger.RecordPayment(ctx, paymentOf(w.cfg.Name, task.OrderID, a.Paid))
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("%s (%s)", a.State, result.Outcome), nil
	}
	return "", errors.New(doubtful(task.OrderID, callClose, a).Reason)
}

// report counts what became of a row. What is given up is for a person; a row that is not marked is done again when its lease ends.
func (w *Worker) report(kind, result string, held bool, err error, what ...any) {
	switch {
	case err != nil:
		w.metrics.results.WithLabelValues(kind, resultNotMarked).Inc()
		w.cfg.Logger.Warn("what was done at the gateway could not be recorded; it is done again, with the same key", append(what, "kind", kind, "err", err)...)
	case !held:
		w.metrics.results.WithLabelValues(kind, resultLost).Inc()
	default:
		w.metrics.results.WithLabelValues(kind, result).Inc()
		if result == resultGivenUp {
			w.cfg.Logger.Error("what was to be done at the gateway is given up and parked", append(what, "kind", kind)...)
		}
	}
}

// measureEvery is the pause between two looks at what is owed: as often as a Prometheus server asks, about.
const measureEvery = 5 * time.Second

// measure keeps the gauges of what is owed until ctx ends.
func (w *Worker) measure(ctx context.Context) {
	tick := time.NewTicker(measureEvery)
	defer tick.Stop()
	for {
		limited, cancel := context.WithTimeout(ctx, measureEvery)
		owed, err := w.ledger.Owed(limited)
		cancel()
		if err == nil {
			w.metrics.set(owed)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// backoff is the pause after so many failures: doubled each time, with jitter of up to a half.
func (w *Worker) backoff(failures int, most time.Duration) time.Duration {
	d := w.cfg.BackoffMin
	for range failures - 1 {
		if d >= most/2 {
			d = most
			break
		}
		d *= 2
	}
	return jittered(min(d, most))
}

func jittered(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) } //nolint:gosec // jitter needs no secrecy
