package trial

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/payments/paytest"
	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/producer"
)

var (
	// ErrUsage is returned by Demo for settings that cannot work.
	ErrUsage = errors.New("wrong settings")
	// ErrMissing is returned by Demo when a server that it needs is not there, or is not set up.
	ErrMissing = errors.New("not there")
	// ErrBroken is returned by Demo, beside its report, when an invariant does not hold.
	ErrBroken = errors.New("an invariant is broken")
)

// DemoConfig has the settings of a demo. Everything without a default is required.
type DemoConfig struct {
	Orders  int           // how many are placed; at least 1
	Rate    float64       // orders a second
	Timeout time.Duration // from placing to the deadline; 1 s to 24 h
	Seed    uint64        // of the customers, and of what is lost
	// Lose is the share of the timed messages that is lost on purpose, in percent. Default: 0, none. It needs ReplicaDSN.
	Lose float64

	DSN        string // of the checkout's user
	ReadDSN    string // of a user who may read, on the primary
	ReplicaDSN string // of a user who may read, on a replica. Default: empty, and reconcile is not run at the end
	RocketMQ   rmq.Config
	Topic      string // of the timed messages

	Binary string   // path of lapse
	Args   []string // for all its processes: the configuration file and settings
	Env    []string // of its processes

	Out    io.Writer // gets the progress, and what a person should know
	Getenv func(string) string
}

func (c DemoConfig) validate() error {
	switch {
	case c.Orders < 1 || c.Orders > 1_000_000:
		return fmt.Errorf("%w: orders is %d; allowed are 1 to 1000000", ErrUsage, c.Orders)
	case !(c.Rate > 0 && c.Rate <= 10_000): // NaN, too, is refused
		return fmt.Errorf("%w: rate is %g a second; allowed is more than 0, up to 10000", ErrUsage, c.Rate)
	case c.Timeout < time.Second || c.Timeout > 24*time.Hour:
		return fmt.Errorf("%w: timeout is %s; allowed are 1s to 24h", ErrUsage, c.Timeout)
	case !(c.Lose >= 0 && c.Lose <= 100):
		return fmt.Errorf("%w: lose is %g percent; allowed are 0 to 100", ErrUsage, c.Lose)
	}
	return nil
}

// invisible is how long a received message is hidden from the other consumers: so long its orders wait when a consumer is killed. The
// product's default is a minute, which would be most of a short run; RocketMQ takes 10 s and more, and it has to be longer than
// consumer.cancel_timeout, 10 s.
func (c DemoConfig) invisible() time.Duration {
	return min(max(c.Timeout, 12*time.Second), time.Minute)
}

// settle is how long after the last deadline every order has to be final: what a killed consumer held comes back after the invisible time
// and 2 or 3 s of the broker's own, and once more if it went to a consumer that was killed, too.
func (c DemoConfig) settle() time.Duration { return 2*c.invisible() + 36*time.Second }

const (
	consumers = 2
	// readyWithin bounds the start of a process: the proxy remembers for 20 s that a topic which somebody asked for did not exist.
	readyWithin = time.Minute
	// endWithin is the binary's default shutdown.grace, and some time to get there.
	endWithin = 25 * time.Second
)

// Demo runs a shop against real processes of the binary, a relay and two consumers, of which one is killed with SIGKILL in the middle and
// started again, waits until every order is final, lets reconcile look for what was missed if there is a replica, and checks everything;
// the tables are audited when the consumer is gone, too. Whatever happens, the processes have ended when it returns.
//
// Errors: [ErrUsage], [ErrMissing], [ErrBroken], the context's, and others. The report is there with a nil error and with ErrBroken.
func Demo(ctx context.Context, cfg DemoConfig) (_ Report, err error) {
	if err := cfg.validate(); err != nil {
		return Report{}, err
	}
	d := &demo{
		cfg: cfg, name: runName("demo"), started: time.Now(), minID: orders.NewID(), ledger: NewLedger(),
		// A line every five to twenty lines' time of a run.
		display: NewDisplay(cfg.Out, cfg.Getenv, min(max(cfg.Timeout/5, 2*time.Second), time.Minute)),
	}
	defer d.display.Done()
	if err := d.connect(ctx); err != nil {
		return Report{}, errors.Join(err, d.disconnect())
	}
	defer func() { err = errors.Join(err, d.disconnect()) }()
	if d.dir, err = os.MkdirTemp("", "lapse-demo-"); err != nil {
		return Report{}, fmt.Errorf("make a folder for the logs: %w", err)
	}
	report, err := d.run(ctx)
	if err != nil && ctx.Err() == nil {
		d.display.Say("the logs of the processes are in %s", d.dir)
		return report, err
	}
	return report, errors.Join(err, os.RemoveAll(d.dir))
}

// demo is one run.
type demo struct {
	cfg     DemoConfig
	name    string
	started time.Time
	minID   int64 // smaller than the ids of the run's orders
	ledger  *Ledger
	display *Display
	dir     string // of the logs

	middle []orders.Check // of the audit in the middle; nil where there was none

	between    *goBetween    // nil: nothing is lost
	before     map[int64]Row // what reconcile found; nil: it was not run
	reconciled *Reconciled
	service    *paytest.Service // nil: the refunds are left out

	client *producer.Client
	stock  *orders.Store // fills the shelf, which is no verb of a checkout
	reader *orders.Store
}

// runName names a run, so that runs in one database can be told apart.
func runName(what string) string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand, since Go 1.24)
	return what + "-" + hex.EncodeToString(b[:])
}

// connect makes sure that all servers are there, before anything is started.
func (d *demo) connect(ctx context.Context) error {
	const how = `bring the servers up: scripts/stack up && eval "$(scripts/stack env)"`
	if d.cfg.DSN == "" || d.cfg.RocketMQ.Endpoints == "" {
		return fmt.Errorf("the addresses of MySQL and RocketMQ are %w; %s", ErrMissing, how)
	}
	if d.cfg.Lose > 0 && d.cfg.ReplicaDSN == "" {
		return fmt.Errorf("the address of a replica, mysql.dsn_replica, is %w: what is lost on purpose is found by reconcile, which reads one; bring it up: %s", ErrMissing, withReplica)
	}
	var err error
	if d.client, err = producer.Open(d.cfg.DSN, producer.Config{}); err != nil {
		return err
	}
	if d.stock, err = orders.Open(d.cfg.DSN, orders.Config{MaxOpenConns: 2}); err != nil {
		return err
	}
	if d.reader, err = orders.Open(d.cfg.ReadDSN, orders.Config{MaxOpenConns: 2}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	if err := d.client.Ready(ctx); err != nil {
		return fmt.Errorf("MySQL is %w: %w; %s", ErrMissing, err, how)
	}
	if err := d.reader.DB().PingContext(ctx); err != nil {
		return fmt.Errorf("MySQL is %w for the reading user: %w; %s", ErrMissing, err, how)
	}
	if d.cfg.ReplicaDSN != "" {
		if err := pingReplica(ctx, d.cfg.ReplicaDSN); err != nil {
			return err
		}
	}
	var dialer net.Dialer
	var errs []error
	for endpoint := range strings.SplitSeq(d.cfg.RocketMQ.Endpoints, ";") {
		conn, err := dialer.DialContext(ctx, "tcp", strings.TrimSpace(endpoint))
		if err == nil {
			return conn.Close()
		}
		errs = append(errs, err)
	}
	return fmt.Errorf("RocketMQ is %w: %w; %s", ErrMissing, errors.Join(errs...), how)
}

// withReplica is how to get a replica.
const withReplica = `scripts/stack up --with replica && eval "$(scripts/stack env)"`

// pingReplica asks whether a replica is there and takes the account. It names no database: a replica may get one that was just made later than
// we ask.
func pingReplica(ctx context.Context, dsn string) error {
	parsed, err := mysql.ParseDSN(dsn)
	if err != nil {
		return fmt.Errorf("%w: a DSN of the replica cannot be read; expected user:password@tcp(host:port)/database", ErrUsage)
	}
	parsed.DBName = ""
	db, err := sql.Open("mysql", parsed.FormatDSN())
	if err == nil {
		err = errors.Join(db.PingContext(ctx), db.Close())
	}
	if err != nil {
		return fmt.Errorf("the replica is %w: %w; bring it up: %s", ErrMissing, err, withReplica)
	}
	return nil
}

func (d *demo) disconnect() error {
	var errs []error
	if d.client != nil {
		errs = append(errs, d.client.Close())
	}
	for _, s := range []*orders.Store{d.stock, d.reader} {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(errs...)
}

func (d *demo) run(ctx context.Context) (_ Report, err error) {
	ahead, err := ClockAhead(ctx, d.reader.DB())
	if err != nil {
		return Report{}, err
	}
	if err := d.fillShelf(ctx); err != nil {
		return Report{}, err
	}
	interrupted := ctx
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	if err := d.openGateway(ctx); err != nil {
		return Report{}, err
	}
	if d.service != nil {
		// When the processes have ended.
		defer func() { err = errors.Join(err, d.service.Close()) }()
	}
	crew := newCrew(d.cfg.Binary, d.environment(), d.dir, stop)
	defer func() {
		if interrupted.Err() != nil {
			d.display.Say("%s  interrupted, ending the processes; once more ends them at once", clock(time.Since(d.started)))
		}
		// What a process says when it is ended in the middle of something is of no interest.
		if ended := crew.end(endWithin); err == nil {
			err = ended
		}
	}()
	if d.cfg.Lose > 0 {
		if d.between, err = startGoBetween(ctx, d.cfg.RocketMQ, d.cfg.Topic, d.cfg.Lose/100, d.cfg.Seed); err != nil {
			return Report{}, err
		}
		defer d.between.close()
	}
	first, err := d.startAll(ctx, crew)
	if err != nil {
		return Report{}, cause(ctx, err)
	}

	customers := Draw(d.name, d.cfg.Seed, d.cfg.Orders, d.cfg.Timeout)
	shop := &Shop{Run: d.name, Checkout: d.client, Ledger: d.ledger, Rate: d.cfg.Rate, Timeout: d.cfg.Timeout, ClockAhead: ahead}
	served := make(chan struct{})
	go func() { // ends when all customers have done everything, or with ctx
		defer close(served)
		shop.Serve(ctx, customers)
	}()
	kills, err := d.watch(ctx, crew, first, customers, served, ahead)
	if err != nil {
		err = cause(ctx, err)
		stop(nil)
		<-served
		return Report{}, err
	}
	if d.cfg.ReplicaDSN != "" {
		if d.before, d.reconciled, err = d.reconcile(ctx, crew, ahead); err != nil {
			return Report{}, cause(ctx, err)
		}
	}
	if d.service != nil {
		if err := d.awaitRefunds(ctx); err != nil {
			return Report{}, cause(ctx, err)
		}
	}
	// Everybody stops first: nothing may move under the audit, and what the processes still had to write is written.
	d.display.Say("%s  ending the processes and checking", clock(time.Since(d.started)))
	if err := crew.end(endWithin); err != nil {
		return Report{}, err
	}
	return d.report(interrupted, kills)
}

// cause gives the reason why the context of a run has ended, where that is behind the error.
func cause(ctx context.Context, err error) error {
	if why := context.Cause(ctx); why != nil {
		return why
	}
	return err
}

func (d *demo) fillShelf(ctx context.Context) error {
	for _, sku := range Shelf(d.name, d.cfg.Orders) {
		var err error
		if sku.Stock < 0 {
			err = d.stock.SetUnlimited(ctx, sku.Name)
		} else {
			err = d.stock.AdjustStock(ctx, orders.NewID(), sku.Name, sku.Stock)
		}
		if err != nil {
			return fmt.Errorf("fill the shelf: %w", err)
		}
	}
	return nil
}

// startAll starts the relay and the consumers side by side, waits until all are ready, and gives the first consumer.
func (d *demo) startAll(ctx context.Context, crew *crew) (first *process, err error) {
	also := ""
	if d.service != nil {
		also = ", and lapse refund"
	}
	d.display.Say("%s  starting a relay and %d consumers%s", clock(time.Since(d.started)), consumers, also)
	all := make([]*process, 0, 2+consumers)
	args := d.args("relay")
	if d.between != nil {
		d.display.Say("%s  the relay's messages pass a go-between, which loses %g %% of them", clock(time.Since(d.started)), d.cfg.Lose)
		args = append(args, "--set", "rocketmq.endpoints="+d.between.endpoint(), "--set", "rocketmq.tls.enabled=false")
	}
	p, err := crew.start("relay", args...)
	if err != nil {
		return nil, err
	}
	all = append(all, p)
	for n := range consumers {
		if p, err = d.startConsumer(crew, n+1); err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	if d.service != nil {
		if p, err = crew.start("refund", d.refundArgs()...); err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	ready, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	for _, p := range all {
		if err := crew.waitReady(ready, p); err != nil {
			if ready.Err() != nil && ctx.Err() == nil {
				err = fmt.Errorf("what the processes need is %w: %w; bring the servers up: scripts/stack up", ErrMissing, err)
			}
			return nil, err
		}
	}
	return all[1], nil
}

func (d *demo) startConsumer(crew *crew, n int) (*process, error) {
	return crew.start(fmt.Sprintf("consumer %d", n), d.args("consume", "--set", "consumer.invisible="+d.cfg.invisible().String())...)
}

// args gives the arguments of a process. The user's own settings come after ours and win, but for the addresses: all processes run on one
// machine, and no payment service is to be asked about orders of a demo.
func (d *demo) args(args ...string) []string {
	return append(append(append(args, "--set", "log.format=text"), d.cfg.Args...), "--set", "http.pprof=", "--set", "gateway.url=")
}

// watch shows the progress, kills a consumer in the middle of the cancels, and returns when every order is final, or when its time is up:
// the checks then say which is not.
func (d *demo) watch(ctx context.Context, crew *crew, victim *process, customers []Customer, served <-chan struct{}, ahead time.Duration) (kills []Kill, err error) {
	planned := 0
	for _, c := range customers {
		if c.TimesOut() {
			planned++
		}
	}
	// A quarter of the timeouts have come: cancels are in full flow, and what the killed consumer held comes back before they end.
	killAt := int64(max(planned/4, 1))
	back := make(chan error, 1) // tells that the successor is ready
	killed, coming, done := false, false, false
	var killedAt, failing time.Time
	ticker := time.NewTicker(min(max(d.cfg.Timeout/50, 100*time.Millisecond), time.Second))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case err := <-back:
			if err != nil {
				return nil, err
			}
			coming = false
			k := Kill{Process: victim.name, After: seconds(killedAt.Sub(d.started)), Back: seconds(time.Since(killedAt)), at: killedAt.Add(ahead)}
			kills = append(kills, k)
			d.display.Say("%s  %s is ready again", clock(time.Since(d.started)), victim.name)
			continue
		case <-served:
			served, done = nil, true
			continue
		case <-ticker.C:
		}
		counts, err := ReadCounts(ctx, d.reader.DB(), d.name, d.minID)
		switch {
		case err == nil:
			failing = time.Time{}
		case failing.IsZero():
			failing = time.Now()
			continue
		case time.Since(failing) > patience:
			return nil, err
		default:
			continue
		}
		if !killed && counts.ByTimeout >= killAt {
			killed, coming, killedAt = true, true, time.Now()
			d.display.Say("%s  killing %s with SIGKILL, and starting it again", clock(time.Since(d.started)), victim.name)
			if err := d.replace(ctx, crew, victim, back); err != nil {
				return nil, err
			}
			// At the end nothing is reserved and nothing unpaid: what has to hold of that is seen only here. An order that the killed
			// consumer had in hand may be overdue for as long as any other.
			options := orders.AuditOptions{Grace: d.cfg.settle(), MinID: d.minID, Limit: maxExamples}
			if d.between != nil {
				// What was lost stays overdue until the end, which is for the last audit to judge.
				options.Grace += time.Since(d.started)
			}
			if d.middle, err = orders.Audit(ctx, d.reader.DB(), options); err != nil {
				return nil, err
			}
		}
		placed, refused, last := d.ledger.Counts()
		p := Progress{Elapsed: time.Since(d.started), Orders: d.cfg.Orders, Placed: placed, Refused: refused, Counts: counts}
		switch {
		case coming:
			p.Doing = victim.name + " is starting again"
		case placed+refused < d.cfg.Orders:
			p.Doing = fmt.Sprintf("placing %g orders a second, each with %s to pay", d.cfg.Rate, d.cfg.Timeout)
		default:
			p.Doing = "waiting until every order is final"
		}
		d.display.Show(p)
		if !done || coming {
			continue
		}
		over := last.Add(-ahead)
		settled := counts.Unpaid == 0
		if d.between != nil && !settled && time.Now().After(over) {
			if settled, err = d.onlyLostAreLeft(ctx); err != nil {
				return nil, err
			}
		}
		if settled || time.Now().After(over.Add(d.cfg.settle())) {
			if !settled {
				d.display.Say("%s  %d orders are still unpaid %s after the last deadline", clock(time.Since(d.started)), counts.Unpaid, d.cfg.settle())
			}
			if !killed {
				d.display.Say("no consumer was killed: fewer than %d orders were cancelled by timeout", killAt)
			}
			return kills, nil
		}
	}
}

// onlyLostAreLeft reports whether every order that is still unpaid is one whose message was lost on purpose.
func (d *demo) onlyLostAreLeft(ctx context.Context) (bool, error) {
	rows, err := ReadRows(ctx, d.reader.DB(), d.name, d.minID)
	if err != nil {
		return false, err
	}
	lost := d.between.loss().Orders
	return !slices.ContainsFunc(overdueIn(rows), func(id int64) bool { return !lost[id] }), nil
}

// replace kills a consumer and starts its successor; back gets word when that is ready.
func (d *demo) replace(ctx context.Context, crew *crew, victim *process, back chan<- error) error {
	if err := crew.kill(victim); err != nil {
		return err
	}
	successor, err := d.startConsumer(crew, 1)
	if err != nil {
		return err
	}
	go func() { // ends within readyWithin, or with ctx
		ready, cancel := context.WithTimeout(ctx, readyWithin)
		defer cancel()
		back <- crew.waitReady(ready, successor)
	}()
	return nil
}

func seconds(d time.Duration) float64 { return d.Round(100 * time.Millisecond).Seconds() }

// report reads what the database has and checks it.
func (d *demo) report(ctx context.Context, kills []Kill) (Report, error) {
	rows, err := ReadRows(ctx, d.reader.DB(), d.name, d.minID)
	if err != nil {
		return Report{}, err
	}
	accounts := d.ledger.Accounts()
	r := Report{
		Run: d.name, StartedAt: d.started.UTC().Truncate(time.Millisecond), Orders: d.cfg.Orders, Rate: d.cfg.Rate,
		Timeout: d.cfg.Timeout.String(), Seed: d.cfg.Seed, Lateness: lateness(rows), Kills: kills,
	}
	r.Kinds, r.Total = tally(accounts, rows)
	countLong(r.Kills, rows)
	audit, err := d.audit(ctx, rows)
	if err != nil {
		return Report{}, err
	}
	r.Checks = inOrder(fold(d.middle, audit), Compare(accounts, rows))
	if d.service != nil {
		var check orders.Check
		check, r.MoneyBack = compareMoneyBack(rows, d.minID, d.service.Refunds())
		r.Checks = inOrder(r.Checks, []orders.Check{check})
	}
	if d.reconciled != nil {
		var lost loss
		if d.between != nil {
			lost = d.between.loss()
			r.Losses = losses(d.cfg.Lose, lost, d.before)
		}
		r.Reconcile = d.reconciled
		r.Checks = inOrder(r.Checks, []orders.Check{compareReconciled(lost, d.before, d.reconciled)})
	}
	r.Took = seconds(time.Since(d.started))
	r.Holds = r.Broken() == 0
	if !r.Holds {
		return r, ErrBroken
	}
	return r, nil
}

// audit checks the invariants on the run's orders and those placed since it began. The grace is a moment, since the run has waited for its
// own; but others may place orders in the same database, and theirs are given the time that ours had.
func (d *demo) audit(ctx context.Context, rows map[int64]Row) ([]orders.Check, error) {
	options := orders.AuditOptions{Grace: time.Millisecond, MinID: d.minID, Limit: maxExamples}
	checks, err := orders.Audit(ctx, d.reader.DB(), options)
	if err != nil {
		return nil, err
	}
	for _, c := range checks {
		if c.Invariant == "I3" && slices.ContainsFunc(c.Examples, func(v orders.Violation) bool { _, ours := rows[v.OrderID]; return !ours }) {
			options.Grace = d.cfg.settle()
			return orders.Audit(ctx, d.reader.DB(), options)
		}
	}
	return checks, nil
}

// fold makes one list of two audits: rows and violations of both.
func fold(middle, end []orders.Check) []orders.Check {
	all := slices.Clone(end)
	for i := range all {
		for _, m := range middle {
			if m.Name == all[i].Name {
				all[i].Rows += m.Rows
				all[i].Violations += m.Violations
				all[i].Examples = slices.Concat(m.Examples, all[i].Examples)
			}
		}
	}
	return all
}

// inOrder puts the checks in the order of the invariants.
func inOrder(lists ...[]orders.Check) []orders.Check {
	all := slices.Concat(lists...)
	slices.SortStableFunc(all, func(a, b orders.Check) int { return strings.Compare(a.Invariant, b.Invariant) })
	return all
}
