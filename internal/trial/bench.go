// What all benches share: a database, a topic and groups of their own, processes of the binary, and orders to place. Each measurement has
// a fresh database, so that none pays for the rows of the one before it.

package trial

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
	"github.com/lapse-orders/lapse/producer"
)

// BenchConfig has the settings of a bench. Everything is required but where it says otherwise.
type BenchConfig struct {
	Orders   int           // of one measurement; of Reconciling: in the table
	Repeat   int           // repetitions, at least 1
	Rate     float64       // orders a second, of Steady; of Reconciling: for the run that is limited
	Duration time.Duration // of one repetition of Steady; of Reconciling: of payments alone, before and after each run

	// Numbers of workers of the other two ways of Burst; of several the best is found by a trial.
	OneByOneWorkers, LimitWorkers []int

	// Of Reconciling.
	Overdue         int       // orders of one run of reconcile, 100 to 1,000,000
	Payments        float64   // a second, all the time
	DSNReconcile    string    // an account on the primary
	DSNReplica      string    // an account on a replica of it
	DSNReplicaAdmin string    // one that may stop and start the replication
	Reconcile       []Setting // the product's, to be printed

	BatchOrders int           // the product's consumer.batch_orders
	Tick        time.Duration // the product's relay.tick

	DSN, DSNMigrate, DSNRelay, DSNConsume, DSNRead string // an account for each role; the database in them is not touched

	RocketMQ    rmq.Config
	BrokerAdmin string // remoting address of the broker, where topic and groups are created
	NameServer  string // its name server, host:port, for a broker that names one which is an address for containers alone; empty: those that it names

	Binary string   // path of lapse
	Args   []string // for all its processes: the configuration file and settings
	Env    []string // of its processes, without the DSNs

	Out    io.Writer // gets the progress
	Getenv func(string) string

	noBroker bool // the bench needs none
}

func (c BenchConfig) validate() error {
	switch {
	case c.Orders < 100 || c.Orders > 10_000_000:
		return fmt.Errorf("%w: orders is %d; allowed are 100 to 10000000", ErrUsage, c.Orders)
	case c.Repeat < 1 || c.Repeat > 100:
		return fmt.Errorf("%w: repeat is %d; allowed are 1 to 100", ErrUsage, c.Repeat)
	case !(c.Rate > 0 && c.Rate <= 10_000): // NaN, too, is refused
		return fmt.Errorf("%w: rate is %g a second; allowed is more than 0, up to 10000", ErrUsage, c.Rate)
	case c.Duration < time.Second || c.Duration > 24*time.Hour:
		return fmt.Errorf("%w: duration is %s; allowed are 1s to 24h", ErrUsage, c.Duration)
	case slices.ContainsFunc(slices.Concat(c.OneByOneWorkers, c.LimitWorkers), func(n int) bool { return n < 1 || n > connections-8 }):
		return fmt.Errorf("%w: %v and %v workers; allowed are 1 to %d", ErrUsage, c.OneByOneWorkers, c.LimitWorkers, connections-8)
	case c.BrokerAdmin == "" && !c.noBroker:
		return fmt.Errorf("%w: a bench makes a topic and groups of its own, and needs the broker's remoting address for it: --broker-admin HOST:PORT, or LAPSE_TEST_BROKER_ADMIN ('scripts/stack env' sets it)", ErrUsage)
	}
	return nil
}

const (
	benchSKUs = 1000
	// connections is the pool of every process of a bench, the same for each design: the largest has 64 workers, and some are for looking.
	connections = 72
	// callers place the orders; as many as the default pool has connections.
	callers = 16
	// benchSeed draws the items, so that every measurement has the same orders.
	benchSeed = 20
	// removeWithin bounds the cleaning up, which goes on after the run was interrupted.
	removeWithin = time.Minute
)

// bench is one run.
type bench struct {
	cfg     BenchConfig
	name    string
	topic   string
	group   string
	admin   *admin.Client
	display *Display
	started time.Time
	dir     string // of the logs
	stages  int
	pids    map[string]int // of the servers, where they can be seen

	placeRate float64 // orders a second that were placed last; 0: not known yet
}

// runBench does what every bench does around its measurements.
func runBench(ctx context.Context, name string, cfg BenchConfig, do func(context.Context, *bench, *BenchReport) error) (_ BenchReport, err error) {
	if err := cfg.validate(); err != nil {
		return BenchReport{}, err
	}
	b := &bench{cfg: cfg, name: runName("bench"), admin: admin.New(cfg.BrokerAdmin, strings.Fields(cfg.NameServer)...), started: time.Now(), display: NewDisplay(cfg.Out, cfg.Getenv, time.Second)}
	b.topic, b.group = "lapse-"+b.name, "lapse-"+b.name+"-cg"
	r := BenchReport{Bench: name, StartedAt: b.started.UTC().Truncate(time.Millisecond), Repeat: cfg.Repeat, Orders: cfg.Orders}
	if r.Settings, err = b.settings(ctx); err != nil {
		return BenchReport{}, err
	}
	b.pids = b.servers()
	if b.dir, err = os.MkdirTemp("", "lapse-bench-"); err != nil {
		return BenchReport{}, fmt.Errorf("make a folder for the logs: %w", err)
	}
	if !cfg.noBroker {
		defer func() { err = errors.Join(err, b.removeTopic(ctx)) }()
		if err := b.createTopic(ctx); err != nil {
			return BenchReport{}, errors.Join(err, os.RemoveAll(b.dir))
		}
	}
	err = do(ctx, b, &r)
	r.Took = seconds(time.Since(b.started))
	if err != nil && ctx.Err() == nil {
		b.display.Say("the logs of the processes are in %s", b.dir)
		return r, err
	}
	return r, errors.Join(err, os.RemoveAll(b.dir))
}

func (b *bench) say(format string, args ...any) {
	b.display.Say("%s  %s", clock(time.Since(b.started)), fmt.Sprintf(format, args...))
}

// settings asks the servers what the figures depend on.
func (b *bench) settings(ctx context.Context) ([]Setting, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	all := []Setting{{"machine", strings.TrimSpace(fmt.Sprintf("%d cores, %s %s/%s %s", runtime.NumCPU(), machine(), runtime.GOOS, runtime.GOARCH, runtime.Version()))}}
	store, err := orders.Open(b.cfg.DSNRead, orders.Config{MaxOpenConns: 1})
	if err != nil {
		return nil, err
	}
	defer store.Close() //nolint:errcheck // only read
	if err := store.DB().PingContext(ctx); err != nil {
		return nil, fmt.Errorf("MySQL is %w: %w; bring the servers up: scripts/stack up", ErrMissing, err)
	}
	err = each(ctx, store.DB(), `SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'innodb_flush_log_at_trx_commit', 'sync_binlog', 'log_bin',
		'innodb_buffer_pool_size', 'innodb_flush_method', 'innodb_doublewrite')`, nil, func(rows *sql.Rows) error {
		var s Setting
		err := rows.Scan(&s.Name, &s.Value)
		s.Name = "mysql " + s.Name
		all = append(all, s)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the settings of MySQL: %w", err)
	}
	all = append(all, Setting{"connections of each process", strconv.Itoa(connections)})
	if b.cfg.noBroker {
		return append(all, b.cfg.Reconcile...), b.checkReplica(ctx)
	}
	broker, err := b.admin.BrokerConfig(ctx)
	if err != nil {
		return nil, fmt.Errorf("the broker's remoting address is %w: %w; bring the servers up: scripts/stack up", ErrMissing, err)
	}
	for _, key := range []string{"timerPrecisionMs", "flushDiskType", "brokerRole", "timerWheelEnable"} {
		all = append(all, Setting{"broker " + key, broker[key]})
	}
	return append(all, Setting{"lapse consumer.batch_orders", strconv.Itoa(b.cfg.BatchOrders)}, Setting{"lapse relay.tick", b.cfg.Tick.String()}), nil
}

// servers finds the servers' processes, where they run on this machine.
func (b *bench) servers() map[string]int {
	pids := map[string]int{}
	find := func(name, addr string) {
		host, text, err := net.SplitHostPort(addr)
		port, _ := strconv.Atoi(text)
		if ip := net.ParseIP(host); err == nil && port > 0 && (host == "localhost" || ip != nil && ip.IsLoopback()) {
			if pid := listener(port); pid > 0 {
				pids[name] = pid
			}
		}
	}
	if dsn, err := mysql.ParseDSN(b.cfg.DSN); err == nil {
		find("mysql", dsn.Addr)
	}
	if b.cfg.noBroker {
		if dsn, err := mysql.ParseDSN(b.cfg.DSNReplica); err == nil {
			find("replica", dsn.Addr)
		}
	} else {
		find("broker", b.cfg.BrokerAdmin)
	}
	return pids
}

func (b *bench) createTopic(ctx context.Context) error {
	if err := b.admin.CreateTopic(ctx, b.topic, admin.Delay, 8); err != nil {
		return err
	}
	if err := b.admin.CreateGroup(ctx, b.group, 16); err != nil {
		return err
	}
	return b.admin.CreateGroup(ctx, b.group+"-dlq", 1000)
}

func (b *bench) removeTopic(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
	defer cancel()
	var errs []error
	for _, topic := range []string{b.topic, "%RETRY%" + b.group + "_" + b.topic, "%RETRY%" + b.group, "%DLQ%" + b.group, "%RETRY%" + b.group + "-dlq", "%DLQ%" + b.group + "-dlq"} {
		errs = append(errs, b.admin.DeleteTopic(ctx, topic))
	}
	return errors.Join(append(errs, b.admin.DeleteGroup(ctx, b.group), b.admin.DeleteGroup(ctx, b.group+"-dlq"))...)
}

// stage is one measurement: its database and its processes.
type stage struct {
	*bench
	database string
	client   *producer.Client
	reader   *sql.DB
	crew     *crew
	died     context.CancelCauseFunc
	ahead    time.Duration // of the database's clock
	all      []*process
}

// stage prepares a measurement, does it, and takes everything away again, whatever happened. The context ends when a process dies.
func (b *bench) stage(ctx context.Context, do func(context.Context, *stage) error) (err error) {
	b.stages++
	s := &stage{bench: b, database: fmt.Sprintf("lapse_%s_%d", strings.ReplaceAll(b.name, "-", "_"), b.stages)}
	outer := ctx
	ctx, s.died = context.WithCancelCause(ctx)
	defer s.died(nil)

	dsn, err := mysql.ParseDSN(b.cfg.DSNMigrate)
	if err != nil {
		return fmt.Errorf("%w: the database's DSN for migrations cannot be read; expected user:password@tcp(host:port)/database", ErrUsage)
	}
	dsn.DBName = ""
	owner, err := sql.Open("mysql", dsn.FormatDSN())
	if err != nil {
		return err
	}
	defer owner.Close() //nolint:errcheck // nothing is under way any more
	if _, err := owner.ExecContext(ctx, "CREATE DATABASE "+s.database+" CHARACTER SET utf8mb4"); err != nil {
		return fmt.Errorf("create database %s: %w; the account of mysql.dsn_migrate needs all rights on lapse_bench_…", s.database, err)
	}
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(outer), removeWithin)
		defer cancel()
		if _, dropped := owner.ExecContext(clean, "DROP DATABASE "+s.database); dropped != nil {
			err = errors.Join(err, fmt.Errorf("drop database %s: %w", s.database, dropped))
		}
	}()
	if err := s.migrate(ctx); err != nil {
		return err
	}
	reader, err := orders.Open(s.dsn(b.cfg.DSNRead), orders.Config{MaxOpenConns: 4})
	if err != nil {
		return err
	}
	defer reader.Close() //nolint:errcheck // only read
	s.reader = reader.DB()
	if s.client, err = producer.Open(s.dsn(b.cfg.DSN), producer.Config{MaxOpenConns: connections}); err != nil {
		return err
	}
	defer s.client.Close() //nolint:errcheck // nothing is under way any more
	if s.ahead, err = ClockAhead(ctx, s.reader); err != nil {
		return err
	}
	if err := s.fill(ctx); err != nil {
		return cause(ctx, err)
	}
	env := slices.DeleteFunc(slices.Clone(b.cfg.Env), func(v string) bool {
		return strings.HasPrefix(v, "LAPSE_MYSQL_DSN") || strings.HasPrefix(v, "LAPSE_ROCKETMQ_TOPIC=") || strings.HasPrefix(v, "LAPSE_ROCKETMQ_GROUP=")
	})
	env = append(env, "LAPSE_MYSQL_DSN="+s.dsn(b.cfg.DSN), "LAPSE_MYSQL_DSN_RELAY="+s.dsn(b.cfg.DSNRelay), "LAPSE_MYSQL_DSN_CONSUME="+s.dsn(b.cfg.DSNConsume),
		"LAPSE_MYSQL_DSN_RECONCILE="+s.dsn(b.cfg.DSNReconcile))
	if b.cfg.DSNReplica != "" {
		env = append(env, "LAPSE_MYSQL_DSN_REPLICA="+s.dsn(b.cfg.DSNReplica))
	}
	s.crew = newCrew(b.cfg.Binary, env, b.dir, s.died)
	defer func() {
		if ended := s.crew.end(endWithin); err == nil {
			err = ended
		}
	}()
	if err := do(ctx, s); err != nil {
		return cause(ctx, err)
	}
	return nil
}

// dsn is the DSN of a role for this stage's database.
func (s *stage) dsn(role string) string {
	parsed, err := mysql.ParseDSN(role)
	if err != nil {
		return role // whoever opens it says what is wrong
	}
	parsed.DBName = s.database
	return parsed.FormatDSN()
}

func (s *stage) migrate(ctx context.Context) error {
	store, err := orders.Open(s.dsn(s.cfg.DSNMigrate), orders.Config{MaxOpenConns: 2})
	if err != nil {
		return err
	}
	defer store.Close() //nolint:errcheck // nothing is under way any more
	_, err = migrations.Up(ctx, store.DB())
	return err
}

// fill makes the articles, with more stock than will ever be asked for.
func (s *stage) fill(ctx context.Context) error {
	store, err := orders.Open(s.dsn(s.cfg.DSN), orders.Config{MaxOpenConns: callers})
	if err != nil {
		return err
	}
	defer store.Close() //nolint:errcheck // nothing is under way any more
	return inParallel(ctx, benchSKUs, callers, func(ctx context.Context, i int) error {
		return store.AdjustStock(ctx, orders.NewID(), benchSKU(i), 1_000_000_000)
	})
}

func benchSKU(i int) string { return fmt.Sprintf("sku-%04d", i) }

// inParallel does something n times, in order, at most so many at once, and gives the first error.
func inParallel(ctx context.Context, n, atOnce int, do func(ctx context.Context, i int) error) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var next atomic.Int64
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() { // ends with the last one, or with ctx
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := do(ctx, i); err != nil {
					stop(err)
				}
			}
		})
	}
	all.Wait()
	return context.Cause(ctx)
}

// start starts a process of the binary and waits until it is ready. The user's settings come before ours: the measurement's win.
func (s *stage) start(ctx context.Context, what string, set ...string) (*process, error) {
	args := append([]string{what, "--set", "log.format=text"}, s.cfg.Args...)
	for _, assignment := range append([]string{"http.pprof=", "rocketmq.topic=" + s.topic, "rocketmq.group=" + s.group, fmt.Sprintf("mysql.max_open_conns=%d", connections)}, set...) {
		args = append(args, "--set", assignment)
	}
	p, err := s.crew.start(what, args...)
	if err == nil {
		s.all = append(s.all, p)
	}
	return p, err
}

func (s *stage) waitReady(ctx context.Context) error {
	ready, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	for _, p := range s.all {
		if err := s.crew.waitReady(ready, p); err != nil {
			if ready.Err() != nil && ctx.Err() == nil {
				err = fmt.Errorf("what the processes need is %w: %w", ErrMissing, err)
			}
			return err
		}
	}
	return nil
}

// now is the database's clock.
func (s *stage) now() time.Time { return time.Now().Add(s.ahead) }

// benchOrder is the i-th order of a measurement: two items out of a thousand.
func benchOrder(i int) orders.NewOrder {
	rng := rand.New(rand.NewPCG(benchSeed, uint64(i))) //nolint:gosec // has to be repeatable, not secret
	first := rng.IntN(benchSKUs)
	second := (first + 1 + rng.IntN(benchSKUs-1)) % benchSKUs
	items := []orders.Item{{SKU: benchSKU(first), Quantity: 1 + rng.Int64N(3), Price: 1999}, {SKU: benchSKU(second), Quantity: 1, Price: 4900}}
	return orders.NewOrder{ID: orders.NewID(), Channel: "bench", UserID: fmt.Sprintf("customer-%d", i), Currency: currency, Amount: items[0].Quantity*1999 + 4900, Items: items}
}

// place places n orders whose deadlines are spread evenly over a time from first on, and remembers how fast that went.
func (s *stage) place(ctx context.Context, n int, first time.Time, spread time.Duration) error {
	begun := time.Now()
	err := inParallel(ctx, n, callers, func(ctx context.Context, i int) error {
		o := benchOrder(i)
		// From i+1: a first order right on a tick would be a burst of one, a tick before all others.
		o.DeadlineAt = first.Add(spread * time.Duration(i+1) / time.Duration(n))
		_, err := s.client.PlaceOrder(ctx, o)
		return err
	})
	if err != nil {
		return fmt.Errorf("place %d orders: %w", n, err)
	}
	s.placeRate = float64(n) / time.Since(begun).Seconds()
	return nil
}

// count counts rows.
func (s *stage) count(ctx context.Context, query string, args ...any) (int, error) {
	var n int
	err := s.reader.QueryRowContext(ctx, query, args...).Scan(&n)
	if err != nil {
		err = fmt.Errorf("count rows: %w", err)
	}
	return n, err
}

// awaitNone waits until a query counts nothing, and gives the instant at which it was asked for the last time, by the database's clock.
func (s *stage) awaitNone(ctx context.Context, limit time.Duration, pause time.Duration, what, query string) (time.Time, error) {
	giveUp := time.NewTimer(limit)
	defer giveUp.Stop()
	for {
		n, err := s.count(ctx, query)
		if err != nil {
			return time.Time{}, err
		}
		if n == 0 {
			return s.now(), nil
		}
		next := time.NewTimer(pause)
		select {
		case <-next.C:
		case <-giveUp.C:
			next.Stop()
			return time.Time{}, fmt.Errorf("after %s, %d %s", limit, n, what)
		case <-ctx.Done():
			next.Stop()
			return time.Time{}, ctx.Err()
		}
	}
}

// awaitSent waits until the relay has sent everything.
func (s *stage) awaitSent(ctx context.Context, limit time.Duration) error {
	_, err := s.awaitNone(ctx, limit, 100*time.Millisecond, "outbox rows are not sent", "SELECT COUNT(*) FROM outbox WHERE state = 'pending'")
	return err
}

// uses reads what the processes and the servers have used up to now.
func (s *stage) uses() map[string]usage {
	all := map[string]usage{}
	take := func(name string, pid int) {
		if u, seen := usageOf(pid); seen {
			all[name] = u
		}
	}
	for _, p := range s.all {
		take(p.name, p.cmd.Process.Pid)
	}
	for name, pid := range s.pids {
		take(name, pid)
	}
	take("bench", os.Getpid())
	return all
}

func megabytes(bytes int64) float64 { return float64(bytes) / 1e6 }
func millisOf(d time.Duration) float64 {
	return float64(d) / float64(time.Millisecond)
}
