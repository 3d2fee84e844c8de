package trial

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// Reconciling measures how fast reconcile cancels, what memory it takes, and what payments feel of it: the binary itself, on a filled database and
// a real replica, in three ways in the same database. Between them payments go on alone, to compare with. Errors are those of [Demo].
func Reconciling(ctx context.Context, cfg BenchConfig) (BenchReport, error) {
	switch {
	case !(cfg.Payments > 0 && cfg.Payments <= 1000): // NaN, too, is refused
		return BenchReport{}, fmt.Errorf("%w: payments are %g a second; allowed is more than 0, up to 1000", ErrUsage, cfg.Payments)
	case cfg.Overdue < 100 || cfg.Overdue > 1_000_000:
		return BenchReport{}, fmt.Errorf("%w: overdue is %d; allowed are 100 to 1000000", ErrUsage, cfg.Overdue)
	case cfg.Rate < 1:
		return BenchReport{}, fmt.Errorf("%w: rate is %g; allowed are 1 to 10000", ErrUsage, cfg.Rate)
	}
	f := filling{total: cfg.Orders, overdue: cfg.Overdue, ways: len(reconcileWays)}
	f.waiting = int(cfg.Payments * (payFor.Seconds() + float64(f.ways*f.overdue)/slowest))
	if least := f.ways*f.overdue + f.waiting; f.total < least {
		return BenchReport{}, fmt.Errorf("%w: total is %d; with %d overdue orders for each of %d measurements and %d that are paid meanwhile it is at least %d", ErrUsage, cfg.Orders, cfg.Overdue, f.ways, f.waiting, least)
	}
	cfg.noBroker = true
	if cfg.DSNReplica == "" || cfg.DSNReplicaAdmin == "" {
		return BenchReport{}, fmt.Errorf("the address of a replica (mysql.dsn_replica), and of an account that may stop it (LAPSE_TEST_REPLICA_ADMIN_DSN), are %w: %s brings one up and sets both", ErrMissing, withReplica)
	}
	return runBench(ctx, "reconcile", cfg, func(ctx context.Context, b *bench, r *BenchReport) error {
		for i := range cfg.Repeat {
			b.say("repetition %d of %d: filling %d orders", i+1, cfg.Repeat, cfg.Orders)
			if err := b.stage(ctx, func(ctx context.Context, s *stage) error { return s.reconciling(ctx, i, f, r) }); err != nil {
				return err
			}
		}
		return nil
	})
}

// reconcileWay is one of the ways to run reconcile.
type reconcileWay struct {
	name    string // of its figures
	says    string
	limited bool // at BenchConfig.Rate, else as fast as it can
	stopped bool // with the replica stopped after the scan
}

// reconcileWays are measured in each repetition; each has overdue orders of its own.
var reconcileWays = []reconcileWay{
	{"unthrottled", "unthrottled, the replica follows on the same machine", false, false},
	{"replica_stopped", "unthrottled, the replica stopped after the scan", false, true},
	{"at_rate", "at --rate, the replica follows on the same machine", true, false},
}

const (
	// The orders that wait for their payment last for payFor, and for as long as reconcile takes at slowest orders a second.
	payFor  = 3 * time.Minute
	slowest = 500
	// unlimited is the highest reconcile.rate.
	unlimited = 1_000_000
	// onePage holds all orders of a way, so that a scan is over before the first cancel.
	onePage = 1_000_000
	// reconcilingWithin bounds one run.
	reconcilingWithin = time.Hour
)

// reconciled is one measured run.
type reconciled struct {
	rate   float64 // orders a second, from the first cancel to the end of the process
	peak   int64   // resident memory in bytes; 0: not seen
	cpu    time.Duration
	took   time.Duration
	paused time.Duration
	behind time.Duration // how much longer the replica needed
}

func (s *stage) reconciling(ctx context.Context, repetition int, f filling, r *BenchReport) error {
	f.now = s.now().Truncate(time.Second)
	took, behind, err := s.fillOrders(ctx, f)
	if err != nil {
		return err
	}
	r.add("fill_seconds", fmt.Sprintf("making %d orders, with the binlog on", f.total), took.Seconds())
	r.add("fill_replica_behind_seconds", "then until the replica had them", behind.Seconds())

	p := &payer{stage: s, first: f.firstWaiting(), count: f.waiting}
	stop := p.start(ctx)
	if err := errors.Join(s.waysInTurn(ctx, repetition, f, p, r), stop()); err != nil {
		return err
	}
	return s.auditFrom(ctx, f.firstOverdue())
}

// waysInTurn measures each way, with payments alone before and after it. The first window of payments counts for nothing: the database still writes
// what was filled, and connections are made.
func (s *stage) waysInTurn(ctx context.Context, repetition int, f filling, p *payer, r *BenchReport) error {
	alone := func() ([]time.Duration, error) { return p.during(func() error { return s.pause(ctx, p) }) }
	if _, err := alone(); err != nil {
		return err
	}
	before, err := alone()
	if err != nil {
		return err
	}
	for i := range reconcileWays {
		// Another one begins in each repetition: the tables grow by the events of the earlier ones.
		way := (repetition + i) % len(reconcileWays)
		meanwhile, err := s.reconcileOne(ctx, f, way, p, r)
		if err != nil {
			return err
		}
		after, err := alone()
		if err != nil {
			return err
		}
		reconcileWays[way].report(r, meanwhile, slices.Sorted(slices.Values(slices.Concat(before, after))))
		before = after
	}
	return nil
}

// report compares the payments while reconcile ran with those before and after it; both are sorted.
func (w reconcileWay) report(r *BenchReport, meanwhile, alone []time.Duration) {
	with, without := millisOf(percentile(meanwhile, 99)), millisOf(percentile(alone, 99))
	ratio := r.add(w.name+"_pay_p99_ratio", "p99 of payments meanwhile against alone, right before and after", with/without)
	if w.limited {
		ratio.aim(AtMost, 2)
	}
	r.add(w.name+"_pay_p99_ms", "payments meanwhile, each from the instant at which its notice comes", with)
	r.add(w.name+"_pay_p50_ms", "payments meanwhile", millisOf(percentile(meanwhile, 50)))
	r.add(w.name+"_alone_p99_ms", "payments alone, right before and after", without)
	r.add(w.name+"_alone_p50_ms", "payments alone, right before and after", millisOf(percentile(alone, 50)))
}

// pause lets the payments go on alone.
func (s *stage) pause(ctx context.Context, p *payer) error {
	if !waitUntil(ctx, time.Now().Add(s.cfg.Duration)) {
		return ctx.Err()
	}
	return p.failure()
}

// reconcileOne measures one way, and gives the payments meanwhile, sorted.
func (s *stage) reconcileOne(ctx context.Context, f filling, way int, p *payer, r *BenchReport) ([]time.Duration, error) {
	w := reconcileWays[way]
	u, paid, err := s.reconcileRun(ctx, f, way, p)
	if err == nil {
		err = p.failure()
	}
	if err != nil {
		return nil, fmt.Errorf("reconcile, %s: %w", w.says, err)
	}
	s.say("%s: %.0f orders/s, payments p99 %.0f ms (%d payments)", w.says, u.rate, millisOf(percentile(paid, 99)), len(paid))
	figure := r.add(w.name+"_orders_per_second", "cancelled from the first one to the end of the process: "+w.says, u.rate)
	if !w.limited {
		figure.aim(AtLeast, 5000)
	}
	if u.peak > 0 {
		r.add(w.name+"_peak_mb", "peak of the resident memory of reconcile", megabytes(u.peak)).aim(AtMost, 64)
		r.add(w.name+"_cores", "CPU of reconcile: seconds a second", u.cpu.Seconds()/u.took.Seconds())
	}
	r.add(w.name+"_paused_seconds", "for which reconcile gave way to lock waits and to the replica", u.paused.Seconds())
	r.add(w.name+"_replica_behind_seconds", "until the replica had caught up with what was cancelled", u.behind.Seconds())
	return paid, nil
}

// reconcileRun runs reconcile on the orders of one way, and gives the payments while its process ran.
func (s *stage) reconcileRun(ctx context.Context, f filling, way int, p *payer) (u reconciled, paid []time.Duration, err error) {
	w := reconcileWays[way]
	ctx, cancel := context.WithTimeout(ctx, reconcilingWithin)
	defer cancel()
	from, until := f.deadlines(way)
	rate := unlimited
	if w.limited {
		rate = int(s.cfg.Rate)
	}
	args := append([]string{"reconcile", "--once", "--json", "--from", from.UTC().Format(time.RFC3339), "--until", until.UTC().Format(time.RFC3339)}, s.cfg.Args...)
	args = append(args, "--set", "log.format=text", "--set", fmt.Sprintf("reconcile.rate=%d", rate), "--set", fmt.Sprintf("mysql.max_open_conns=%d", connections))
	if w.stopped {
		args = append(args, "--set", fmt.Sprintf("reconcile.page=%d", onePage), "--set", "reconcile.max_lag=1h", "--set", "reconcile.pause_lag=1h")
	}
	before, err := s.lastEvent(ctx)
	if err != nil {
		return u, nil, err
	}
	halted := make(chan error, 1)
	watching, over := context.WithCancel(ctx)
	defer over()
	if w.stopped {
		go func() { halted <- s.stopReplica(watching, before) }() // ends with the first cancel, or with the run
	} else {
		halted <- nil
	}
	var ran ran
	paid, err = p.during(func() (err error) {
		ran, err = s.crew.run(ctx, "reconcile", args...)
		return err
	})
	ended := s.now()
	over()
	stopped := <-halted
	if w.stopped {
		err = errors.Join(err, s.startReplica(ctx))
	}
	switch {
	case err != nil:
		return u, nil, err
	case ran.code == exitMissing:
		return u, nil, fmt.Errorf("the replica is %w, or cannot be relied on:\n%s", ErrMissing, ran.lastWords)
	case ran.code != 0:
		return u, nil, fmt.Errorf("it ended with exit status %d; its last words:\n%s", ran.code, ran.lastWords)
	case stopped != nil:
		return u, nil, stopped
	}
	var told struct {
		Cancelled int           `json:"cancelled"`
		Paused    time.Duration `json:"paused_ns"`
	}
	if err := json.Unmarshal(ran.stdout, &told); err != nil {
		return u, nil, fmt.Errorf("read what it reports: %w: %.200q", err, ran.stdout)
	}
	var n int
	var first string
	err = s.reader.QueryRowContext(ctx, "SELECT COUNT(*), COALESCE(CAST(MIN(cancelled_at) AS CHAR), '') FROM orders WHERE id >= ? AND status = 'cancelled' AND deadline_at >= ? AND deadline_at < ?",
		f.firstOverdue(), from.UTC().Format(layout), until.UTC().Format(layout)).Scan(&n, &first)
	if err != nil {
		return u, nil, fmt.Errorf("read what it cancelled: %w", err)
	}
	if n != f.overdue || told.Cancelled != n {
		return u, nil, fmt.Errorf("%w: %d orders are overdue, %d are cancelled, and it reports %d", ErrBroken, f.overdue, n, told.Cancelled)
	}
	begun, err := parse(first)
	if err != nil {
		return u, nil, err
	}
	u = reconciled{took: ended.Sub(begun), peak: ran.used.peak, cpu: ran.used.cpu, paused: told.Paused}
	u.rate = float64(n) / u.took.Seconds()
	u.behind, err = s.replicaBehind(ctx, way)
	return u, paid, err
}

// lastEvent gives the id of the newest event.
func (s *stage) lastEvent(ctx context.Context) (int64, error) {
	var id int64
	err := s.reader.QueryRowContext(ctx, "SELECT COALESCE(MAX(id), 0) FROM order_events").Scan(&id)
	if err != nil {
		err = fmt.Errorf("read the newest event: %w", err)
	}
	return id, err
}

// stopReplica stops the replica once reconcile has cancelled an order: with one page the scan is over then. It neither receives nor applies anything
// until startReplica.
func (s *stage) stopReplica(ctx context.Context, after int64) error {
	for {
		var any bool
		err := s.reader.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM order_events WHERE id > ? AND kind = ?)", after, orders.EventReconciled).Scan(&any)
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("wait for the first cancel, to stop the replica: %w", err)
		}
		if any {
			// Begun is done, even if the run ends meanwhile: half of it would be started again too early.
			return s.replicaAdmin(context.WithoutCancel(ctx), "STOP REPLICA")
		}
		if !waitUntil(ctx, time.Now().Add(20*time.Millisecond)) {
			return fmt.Errorf("the run was over before the replica could be stopped; take more orders (--overdue): %w", ctx.Err())
		}
	}
}

func (s *stage) startReplica(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
	defer cancel()
	return s.replicaAdmin(ctx, "START REPLICA")
}

func (s *stage) replicaAdmin(ctx context.Context, statement string) error {
	db, err := sql.Open("mysql", s.cfg.DSNReplicaAdmin)
	if err != nil {
		return fmt.Errorf("%w: LAPSE_TEST_REPLICA_ADMIN_DSN cannot be read; expected user:password@tcp(host:port)/", ErrUsage)
	}
	defer db.Close() //nolint:errcheck // nothing is under way any more
	if _, err := db.ExecContext(ctx, statement); err != nil {
		return fmt.Errorf("%s on the replica: %w; the account of LAPSE_TEST_REPLICA_ADMIN_DSN has to be allowed that", statement, err)
	}
	return nil
}

// replicaBehind waits until the replica has everything that was committed up to now.
func (s *stage) replicaBehind(ctx context.Context, way int) (time.Duration, error) {
	owner, err := orders.Open(s.dsn(s.cfg.DSNMigrate), orders.Config{MaxOpenConns: 1})
	if err != nil {
		return 0, err
	}
	defer owner.Close() //nolint:errcheck // nothing is under way any more
	begun := time.Now()
	table := fmt.Sprintf("done_%d", way)
	if err := statements(ctx, owner.DB(), "CREATE TABLE "+table+" (i INT PRIMARY KEY)"); err != nil {
		return 0, err
	}
	err = s.awaitReplica(ctx, table)
	return time.Since(begun), err
}

// payer pays waiting orders at a constant rate, each once.
type payer struct {
	*stage
	first int64 // id of the first order
	count int

	mu     sync.Mutex // guards the following
	window []time.Duration
	failed error
}

// start begins to pay. stop ends it, waits for what is under way, and gives the first error.
func (p *payer) start(ctx context.Context) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() { // ended by stop, or with ctx
		begun := time.Now()
		for i := 0; ; i++ {
			at := begun.Add(time.Duration(float64(i) / p.cfg.Payments * float64(time.Second)))
			if !waitUntil(ctx, at) {
				return
			}
			all.Go(func() { p.pay(context.WithoutCancel(ctx), at, i) })
		}
	})
	return func() error {
		cancel()
		all.Wait()
		return p.failure()
	}
}

// pay pays one order. The time counts from the instant at which the notice came: what a slow database holds back is in it.
func (p *payer) pay(ctx context.Context, at time.Time, i int) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := fmt.Errorf("all %d orders that waited for their payment are paid; take fewer payments a second (--payments)", p.count)
	if i < p.count {
		err = p.record(ctx, p.first+int64(i))
	}
	took := time.Since(at)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.window = append(p.window, took)
	if err != nil && p.failed == nil {
		p.failed = err
	}
}

func (p *payer) record(ctx context.Context, id int64) error {
	result, err := p.client.RecordPayment(ctx, orders.Payment{
		Gateway: gateway, TransactionID: fmt.Sprintf("bench-%d", id), OrderID: id, Currency: currency, Amount: fillAmount, PaidAt: time.Now(),
	})
	if err == nil && result.Outcome != orders.PaymentAccepted {
		err = fmt.Errorf("%w: the payment of order %d, which is not due, is %s", ErrBroken, id, result.Outcome)
	}
	return err
}

func (p *payer) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

// during gives, sorted, how long the payments took that ended while something was done.
func (p *payer) during(do func() error) ([]time.Duration, error) {
	take := func() []time.Duration {
		p.mu.Lock()
		defer p.mu.Unlock()
		taken := p.window
		p.window = nil
		return taken
	}
	take()
	err := do()
	taken := take()
	slices.Sort(taken)
	return taken, err
}

// checkReplica makes sure that the replica is there and may be stopped.
func (b *bench) checkReplica(ctx context.Context) error {
	for _, dsn := range []string{b.cfg.DSNReplica, b.cfg.DSNReplicaAdmin} {
		if err := pingReplica(ctx, dsn); err != nil {
			return err
		}
	}
	return nil
}
