package reconcile

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/lapse-orders/lapse/orders"
)

// ErrReplica is returned by [Reconciler.Run] when the replica cannot be relied on: it is not reachable, lags by more than MaxLag, has stopped, is
// no replica of the primary, or became another server in the middle of the run.
var ErrReplica = errors.New("the replica cannot be relied on")

// ErrAudit is returned by [Reconciler.Run] when the run is done and stored as done, and only its audit failed: there is nothing to run again.
var ErrAudit = errors.New("the run is done, but its audit failed")

// Canceller cancels due orders: an [orders.Store], or a gate around one.
type Canceller interface {
	CancelDue(ctx context.Context, ids []string) ([]orders.Outcome, error)
}

// Options say what one run does.
type Options struct {
	// From and Until bound the deadlines that are looked at: From <= deadline < Until. Default: all that are overdue.
	From, Until time.Time
	// DryRun cancels nothing; it counts what a run would look at.
	DryRun bool
	// Audit checks the invariants on the replica, once the run is done. Where the primary was scanned instead, there is no audit, and the report
	// says why.
	Audit bool
	// Progress is called after each batch, from one goroutine at a time. Default: nil.
	Progress func(Progress)
	// Total asks for Progress.Total, at the price of counting the overdue orders first.
	Total bool

	scheduled time.Time
}

func (o Options) kind() string {
	switch {
	case o.DryRun:
		return kindDry
	case !o.From.IsZero() || !o.Until.IsZero():
		return kindPartial
	}
	return kindFull
}

// Counts are what a run did, in orders.
type Counts struct {
	Scanned     int64 `json:"scanned"`
	Cancelled   int64 `json:"cancelled"`
	AlreadyPaid int64 `json:"already_paid"`
	Held        int64 `json:"held"`
	Parked      int64 `json:"parked"`
	// Others were cancelled by somebody else meanwhile, are not due any more, exempt, or gone.
	Others int64 `json:"others"`
	// Missed is why the message path had not cancelled those that this run cancelled.
	Missed MissedCounts `json:"missed"`
}

// MissedCounts sum up to Counts.Cancelled.
type MissedCounts struct {
	NeverSent       int64 `json:"never_sent"`
	SentNotReceived int64 `json:"sent_not_received"`
	Parked          int64 `json:"parked"`
}

// Progress is how far a run is.
type Progress struct {
	Counts
	Total   int64 // orders to look at; 0 without Options.Total
	Elapsed time.Duration
	Paused  bool
	// Read says that every page was read: what is left are cancels on the primary.
	Read bool
}

// Report is what one run did.
type Report struct {
	RunID int64  `json:"run_id,string"`
	Kind  string `json:"kind"` // full, partial, dry
	// Resumed says that the run was begun by another process, which did not end it. It looked at what was overdue by that run's cut-off; call
	// Run again for what came due since.
	Resumed bool      `json:"resumed"`
	Started time.Time `json:"started_at"`
	Cutoff  time.Time `json:"cutoff_at"` // of the primary's clock
	Server  string    `json:"server"`    // that was scanned: its server_uuid
	Primary bool      `json:"primary_scanned"`
	Counts
	Duration time.Duration `json:"duration_ns"`
	// Lag is how long the replica took to show what the run had written on the primary.
	Lag    time.Duration  `json:"lag_ns"`
	Paused time.Duration  `json:"paused_ns"` // for the sake of payments and of the replica
	Audit  []orders.Check `json:"audit,omitempty"`
	// NotAudited is why an audit that was asked for was not made; empty: it was made, or not asked for.
	NotAudited string `json:"not_audited,omitempty"`
}

// Violations is the number of rows that the audit found broken.
func (r Report) Violations() int64 {
	var n int64
	for _, c := range r.Audit {
		n += c.Violations
	}
	return n
}

// Reconciler finds overdue orders and has them cancelled. It is safe for concurrent use; its runs take turns through the database.
type Reconciler struct {
	cfg       Config
	primary   *orders.Store
	canceller Canceller
	replica   *sql.DB // nil: none
	schedule  *schedule
	metrics   *metrics
	log       *slog.Logger
	now       func() time.Time // the process's clock, which only says when the schedule's time has come
	poll      time.Duration    // how often the daemon looks at that clock
}

// New makes a reconciler. It dials nothing. The primary and the replica (a pool of at least two connections) stay the caller's to close. Without
// a replica, nil, only OnLagPrimary is allowed. The canceller works on the same primary.
func New(primary *orders.Store, canceller Canceller, replica *sql.DB, cfg Config) (*Reconciler, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("reconcile: %w", err)
	}
	if replica == nil && cfg.OnLag != OnLagPrimary {
		return nil, errors.New("reconcile: there is no replica; name one, or let it scan the primary (OnLag primary)")
	}
	s, err := parseSchedule(cfg.Schedule, cfg.Timezone)
	if err != nil {
		return nil, fmt.Errorf("reconcile: %w", err)
	}
	m, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("reconcile: register metrics: %w", err)
	}
	return &Reconciler{cfg: cfg, primary: primary, canceller: canceller, replica: replica, schedule: s, metrics: m, log: cfg.Logger, now: time.Now, poll: 30 * time.Second}, nil
}

// run is one run under way. Its fields are the dispatcher's, but for those under mu.
type run struct {
	*Reconciler
	options Options
	place   *place
	begun   time.Time
	source  *source
	limiter *rate.Limiter
	read    bool  // every page was read
	total   int64 // for the progress
	paused  time.Duration
	lag     time.Duration
	audit   []orders.Check
	// notAudited is why there was no audit.
	notAudited string
	looked     time.Time // when giveWay last asked the servers
	// unwatched says that the replica's lag does not matter any more.
	unwatched bool

	// work ends when the lease is lost, and not when the caller wants the run to stop: a transaction under way is finished.
	work     context.Context
	workers  sync.WaitGroup
	inFlight chan struct{} // one token per transaction under way

	mu       sync.Mutex
	counts   Counts           // guarded by mu, as the following
	beatAt   time.Time        // the newest that was written on the primary
	aside    []orders.Overdue // their rows were locked
	left     bool             // a batch was not gone through to its end
	inRow    int              // orders parked in a row, with none cancelled between
	failure  error            // why the run has to end
	lastShow time.Time
}

// Run makes one run, from its lease to its report. Its report is also given beside an error, for as far as it came. Errors: a [RunningError]
// when another run works, [ErrReplica], [ErrLeaseLost], [ErrAudit], ctx's own; others are of the primary. A run that ctx ends finishes the
// transactions under way and is resumed by the next one.
func (r *Reconciler) Run(ctx context.Context, options Options) (Report, error) {
	if !options.From.IsZero() && !options.Until.IsZero() && !options.From.Before(options.Until) {
		return Report{}, fmt.Errorf("reconcile from %s until %s: there is nothing between", options.From.Format(time.RFC3339), options.Until.Format(time.RFC3339))
	}
	begun := time.Now()
	p, err := r.begin(ctx, options.kind(), options.scheduled)
	if err != nil {
		var other *RunningError
		if errors.As(err, &other) {
			r.metrics.runs.WithLabelValues(resultSkipped).Inc()
		} else {
			r.metrics.runs.WithLabelValues(resultFailed).Inc()
		}
		return Report{}, err
	}
	work, lose := context.WithCancelCause(context.WithoutCancel(ctx))
	defer lose(nil)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	u := &run{Reconciler: r, options: options, place: p, begun: begun, work: work, counts: p.counts, beatAt: p.beat, inFlight: make(chan struct{}, r.cfg.Workers)}
	log := r.log.With("run", p.id)
	log.Info("reconcile begins", "kind", options.kind(), "cutoff", p.cutoff, "resumed", p.resumed)

	var keeper sync.WaitGroup
	stopKeeper := make(chan struct{})
	beats, endBeats := context.WithCancel(work)
	defer endBeats()
	keeper.Go(func() { // ended below
		if err := u.keepLease(beats, stopKeeper); err != nil {
			lose(err)
			cancel(err)
		}
	})
	err = u.all(ctx)
	close(stopKeeper)
	if ctx.Err() != nil {
		endBeats() // one under way may wait for a primary that does not answer
	}
	keeper.Wait()
	if lost := context.Cause(work); lost != nil {
		err = lost
	}
	err = u.end(ctx, err)
	if u.source != nil {
		defer u.source.close()
	}
	// The audit comes after the end, so that one that fails does not have the night's orders looked at again.
	if err == nil && options.Audit {
		if u.audit, err = u.checkAll(ctx); err != nil {
			err = fmt.Errorf("%w: %w", ErrAudit, err)
		}
	}
	report := u.report()
	u.observe(report, err)
	return report, err
}

// all does the work of a run and says why it ended.
func (u *run) all(ctx context.Context) error {
	source, err := u.open(ctx)
	if err != nil {
		return err
	}
	u.source = source // Run closes it
	if source.primary {
		u.limiter = rate.NewLimiter(rate.Limit(min(u.cfg.Rate, u.cfg.PrimaryRate)), u.cfg.Batch)
	} else {
		u.limiter = rate.NewLimiter(rate.Limit(u.cfg.Rate), u.cfg.Batch)
	}
	err = u.scan(ctx)
	u.workers.Wait()
	if err == nil {
		err = u.tryAside(ctx)
	}
	if err == nil {
		err = u.failed()
	}
	return err
}

// scan reads page after page and hands them out in batches.
func (u *run) scan(ctx context.Context) error {
	until := u.place.cutoff.Add(-u.cfg.Grace)
	if !u.options.Until.IsZero() && u.options.Until.Before(until) {
		until = u.options.Until
	}
	after := u.place.cursor
	if from := u.options.From; from.After(after.Deadline) {
		after = orders.Overdue{Deadline: from}
	}
	if u.options.Total {
		err := u.source.ask(ctx, u.cfg.ReadTimeout, func(ctx context.Context) (err error) {
			u.total, err = u.source.scan.Count(ctx, after, until)
			return err
		})
		if err != nil {
			return err
		}
		u.total += u.place.counts.Scanned
	}
	u.show(false)
	for {
		var page []orders.Overdue
		err := u.source.ask(ctx, u.cfg.ReadTimeout, func(ctx context.Context) (err error) {
			page, err = u.source.scan.Page(ctx, after, until, u.cfg.Page)
			return err
		})
		if err != nil {
			return err
		}
		u.read = len(page) < u.cfg.Page
		for begin := 0; begin < len(page); begin += u.cfg.Batch {
			batch := page[begin:min(begin+u.cfg.Batch, len(page))]
			if err := u.dispatch(ctx, batch); err != nil {
				u.workers.Wait()
				// What was handed out before is done: the next run goes on behind it.
				if begin > 0 {
					after = page[begin-1]
				}
				return errors.Join(err, u.keepPlace(ctx, after))
			}
		}
		if len(page) > 0 {
			after = page[len(page)-1]
		}
		u.workers.Wait()
		err = u.keepPlace(ctx, after)
		if u.abandoned() {
			return errors.Join(cause(ctx, ctx.Err()), err)
		}
		if err != nil {
			return err
		}
		if u.read {
			return nil
		}
	}
}

// lastWords is how long a run that was told to stop tries to store its place, and then to give its lease back. Twice this and a transaction of
// CancelTimeout's default under way fit into the grace of a shutdown, 20 s; without either the next run waits for the lease to end.
const lastWords = 3 * time.Second

// keepPlace stores how far the run is. Every order up to after has been handed out and come back. With orders put aside, or batches that were
// left, the place stays before them, and what lies between is read again by the next run.
func (u *run) keepPlace(ctx context.Context, after orders.Overdue) error {
	u.mu.Lock()
	counts := u.counts
	if len(u.aside) > 0 || u.left {
		after = u.place.cursor
	}
	u.mu.Unlock()
	within, cancel := u.work, context.CancelFunc(func() {})
	if ctx.Err() != nil {
		within, cancel = context.WithTimeout(u.work, lastWords)
	}
	defer cancel()
	// Written twice it is the same place, so an answer that was lost does no harm.
	if err := u.patiently(ctx, func() error { return u.keep(within, u.place, after, counts) }); err != nil {
		return err
	}
	u.place.cursor = after
	return nil
}

func (u *run) abandoned() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.left
}

// dispatch hands a batch to a worker once one is free, the rate allows it, and nobody needs the database more.
func (u *run) dispatch(ctx context.Context, batch []orders.Overdue) error {
	if err := u.limiter.WaitN(ctx, len(batch)); err != nil {
		return cause(ctx, err)
	}
	if err := u.giveWay(ctx); err != nil {
		return err
	}
	select {
	case u.inFlight <- struct{}{}:
	case <-ctx.Done():
		return cause(ctx, ctx.Err())
	}
	if failure := u.failed(); failure != nil {
		<-u.inFlight
		return failure
	}
	u.workers.Go(func() { // waited for at the end of the page
		defer func() { <-u.inFlight }()
		if u.options.DryRun {
			u.count(func(c *Counts) { c.Scanned += int64(len(batch)) })
		} else {
			u.cancel(ctx, batch, u.cfg.CancelTimeout)
		}
		u.show(false)
	})
	return nil
}

// cause gives the reason why a context has ended instead of what a waiter made of it.
func cause(ctx context.Context, err error) error {
	if why := context.Cause(ctx); why != nil {
		return why
	}
	return err
}

func (u *run) count(change func(*Counts)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	change(&u.counts)
}

// showEvery bounds the calls of Options.Progress.
const showEvery = 50 * time.Millisecond

func (u *run) show(paused bool) {
	if u.options.Progress == nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !paused && time.Since(u.lastShow) < showEvery && u.counts.Scanned < u.total {
		return
	}
	u.lastShow = time.Now()
	u.options.Progress(Progress{Counts: u.counts, Total: u.total, Elapsed: time.Since(u.begun), Paused: paused, Read: u.read})
}

// keepLease renews the lease until stop is closed. An error says that it is lost. Once a second, since a beat is also what the replica's lag is
// measured by.
func (u *run) keepLease(ctx context.Context, stop <-chan struct{}) error {
	every := min(time.Second, u.cfg.Lease/4)
	tick := time.NewTicker(every)
	defer tick.Stop()
	renewed := u.begun
	for {
		select {
		case <-stop:
			return nil
		case <-tick.C:
		}
		asked := time.Now()
		at, err := u.beat(ctx, u.place)
		switch {
		case err == nil:
			renewed = asked
			u.mu.Lock()
			u.beatAt = at
			u.mu.Unlock()
		case errors.Is(err, ErrLeaseLost):
			return err
		case time.Since(renewed) > u.cfg.Lease:
			return fmt.Errorf("%w: %w", ErrLeaseLost, err)
		}
	}
}

// end stores how the run ended, and gives the error to return.
func (u *run) end(ctx context.Context, err error) error {
	u.mu.Lock()
	counts := u.counts
	u.mu.Unlock()
	limit := u.cfg.CancelTimeout
	if ctx.Err() != nil {
		limit = min(limit, lastWords)
	}
	within, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	switch {
	case errors.Is(err, ErrLeaseLost):
		return err // the row is another's
	case ctx.Err() != nil && err != nil:
		return errors.Join(err, u.leave(within, u.place))
	}
	return errors.Join(err, u.patiently(within, func() error { return u.finish(within, u.place, counts, err) }))
}

func (u *run) report() Report {
	u.mu.Lock()
	defer u.mu.Unlock()
	rep := Report{RunID: u.place.id, Kind: u.options.kind(), Resumed: u.place.resumed, Started: u.place.started, Cutoff: u.place.cutoff,
		Counts: u.counts, Duration: time.Since(u.begun), Lag: u.lag, Paused: u.paused, Audit: u.audit, NotAudited: u.notAudited}
	if u.source != nil {
		rep.Server, rep.Primary = u.source.scan.Server(), u.source.primary
	}
	return rep
}
