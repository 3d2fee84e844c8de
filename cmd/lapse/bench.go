package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/internal/trial"
)

func (a *app) benchCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench COMMAND",
		Short: "Measure lapse on the real servers",
		Long: `Measures lapse on MySQL and RocketMQ, against other ways in the same run: what is compared shares machine, servers and
moment, so that the ratios hold where absolute figures do not. Each measurement has a fresh database, lapse_bench_…,
made as mysql.dsn_migrate and dropped after it; the run has a topic and groups of its own on the broker, for which it
needs the broker's remoting address; reconcile needs a replica instead. What the other accounts may do in lapse_bench_…
is up to the server (deploy/mysql/users.sql allows it).

The settings of the servers that decide the figures are printed with them. A figure that misses its aim is no failure
of the run; a broken invariant is.`,
		Example: `  scripts/stack up && eval "$(scripts/stack env)"
  lapse bench burst
  lapse bench steady --rate 200 --duration 60s
  lapse bench place --json >place.json
  lapse bench reconcile`,
		Args: cobra.ArbitraryArgs,
		RunE: a.group,
	}
	cmd.AddCommand(
		a.benchOf(trial.Burst, 20_000, 3, &cobra.Command{
			Use:   "burst",
			Short: "Cancel many orders whose deadlines fall into one second",
			Long: `Places orders of two items out of 1,000 SKUs, with deadlines spread evenly over one second, and measures how they are
cancelled by a relay and a consumer of their own: orders a second from the first to the last commit, lateness, memory
and CPU of each process. In the same run, interleaved: one message and one transaction for each order, as shops have
it today, with the best of 1, 4, 16 and 64 workers (one_by_one_ratio); and the transactions alone, without messages,
with the best of 1, 2 and 4 workers (limit_ratio). The numbers of workers are tried on a tenth of the orders first.`,
			Example: `  lapse bench burst
  lapse bench burst --orders 5000 --repeat 1 --one-by-one-workers 16 --limit-workers 2
  lapse bench burst --set consumer.batch_orders=200 --json`,
		}),
		a.benchOf(trial.Steady, 0, 3, &cobra.Command{
			Use:   "steady",
			Short: "Measure the lateness at a constant rate",
			Long: `Places orders at a constant rate, each with 5 s to its deadline, and measures the lateness of their cancels, and the
commit lag: from the broker's tick after the deadline to the return of the commit. The consumer runs inside the bench
for that; the relay is a process of its own.`,
			Example: "  lapse bench steady --rate 200 --duration 60s",
		}),
		a.benchOf(trial.Placing, 10_000, 3, &cobra.Command{
			Use:   "place",
			Short: "Measure what the outbox row costs a checkout",
			Long: `Places orders with and without an outbox row, alternating order by order, from 16 callers, --orders of each kind; and
the same with a relay that cannot reach its broker, by turns with one that can, and while as many orders are cancelled
in a burst. Placing is the checkout's transaction: it does not know the broker. The order without the row is one
without a deadline.`,
			Example: "  lapse bench place --orders 10000",
		}),
		a.benchOf(trial.Pending, 1_000_000, 1, &cobra.Command{
			Use:   "pending",
			Short: "Measure what many waiting orders cost",
			Long: `Places orders with a deadline in an hour, and measures how long placing and sending take, how many messages they are,
the memory of the broker before and after (where it runs on this machine), and the relay's. A million takes 20 to
35 minutes and 2 GB on the database's disk; nothing is cancelled.`,
			Example: `  lapse bench pending
  lapse bench pending --orders 100000`,
		}),
		a.benchOf(trial.Reconciling, 2_000_000, 1, &cobra.Command{
			Use:   "reconcile",
			Short: "Cancel what was missed out of millions of orders, with payments going on",
			Long: `Fills a database with --total orders, on the primary and through its binlog on the replica, and runs reconcile three
times on --overdue orders each: unthrottled, with the replica following; unthrottled, with the replica stopped once the
scan is over, as if it ran on a machine of its own; and at --rate. Measured are orders cancelled per second, the memory
of the process, and the p99 of payments, which go on at --payments a second all the time, against the p99 of payments
alone before and after each run.

It needs a replica (mysql.dsn_replica) and, in LAPSE_TEST_REPLICA_ADMIN_DSN, an account that may stop and start it.
Others who read that replica see old data meanwhile. The default takes some 10 minutes, most of it the filling, and
3 GB on the disk of each server.`,
			Example: `  scripts/stack up --with replica && eval "$(scripts/stack env)"
  lapse bench reconcile
  lapse bench reconcile --overdue 200000 --total 2000000 --rate 2000 --repeat 3
  lapse bench reconcile --overdue 5000 --total 50000 --alone 5s --json`,
		}),
	)
	return cmd
}

// benchOf makes the subcommand of one bench. Zero orders: their number follows from --rate and --duration.
func (a *app) benchOf(run func(context.Context, trial.BenchConfig) (trial.BenchReport, error), count, repeat int, cmd *cobra.Command) *cobra.Command {
	var asJSON bool
	bench := trial.BenchConfig{Orders: count, Repeat: repeat, Rate: 1, Duration: time.Minute}
	cmd.Args = a.exactly()
	cmd.RunE = a.begin(func(cmd *cobra.Command, _ []string) error {
		if err := a.benchConfig(cmd, &bench); err != nil {
			return err
		}
		if asJSON {
			bench.Out = a.stderr
		}
		report, err := run(cmd.Context(), bench)
		switch {
		case errors.Is(err, trial.ErrUsage):
			return usageError{err}
		case errors.Is(err, trial.ErrMissing):
			return codeError{err, exitMissing}
		case errors.Is(err, trial.ErrBroken):
			return codeError{err, exitInvariant}
		case err != nil:
			return err
		}
		if asJSON {
			encoder := json.NewEncoder(a.stdout)
			encoder.SetIndent("", "  ")
			return encoder.Encode(report)
		}
		fmt.Fprintln(a.stdout)
		return report.Print(a.stdout, trial.StyleOf(a.stdout, a.getenv))
	})
	flags := cmd.Flags()
	flags.SortFlags = false
	reconcile := cmd.Name() == "reconcile"
	if cmd.Name() == "burst" {
		flags.IntSliceVar(&bench.OneByOneWorkers, "one-by-one-workers", []int{1, 4, 16, 64}, "`numbers` of workers to choose from; one alone needs no trial")
		flags.IntSliceVar(&bench.LimitWorkers, "limit-workers", []int{1, 2, 4}, "`numbers` of workers to choose from")
	}
	switch {
	case reconcile:
		flags.IntVar(&bench.Orders, "total", count, "`number` of orders in the table")
		flags.IntVar(&bench.Overdue, "overdue", count/10, "`number` of orders that each run of reconcile has to cancel")
		flags.Float64Var(&bench.Rate, "rate", 2000, "orders a `second` of the run that is limited")
		flags.Float64Var(&bench.Payments, "payments", 50, "payments a `second`")
		flags.DurationVar(&bench.Duration, "alone", 15*time.Second, "`time` of payments alone, before and after each run")
	case count > 0:
		flags.IntVar(&bench.Orders, "orders", count, "`number` of orders of one measurement")
	default:
		flags.Float64Var(&bench.Rate, "rate", 200, "orders a `second`")
		flags.DurationVar(&bench.Duration, "duration", time.Minute, "`time` of one repetition")
	}
	flags.IntVar(&bench.Repeat, "repeat", repeat, "`number` of repetitions; the median counts")
	if !reconcile {
		flags.StringVar(&bench.BrokerAdmin, "broker-admin", "", "remoting `address` of the broker, host:port; default: $LAPSE_TEST_BROKER_ADMIN")
	}
	flags.BoolVar(&asJSON, "json", false, "print one JSON object on stdout, and the progress on stderr")
	return cmd
}

// benchConfig fills in what the flags do not say.
func (a *app) benchConfig(cmd *cobra.Command, bench *trial.BenchConfig) error {
	cfg, err := a.load(cmd)
	if err != nil {
		return err
	}
	if cfg.MySQL.DSN == "" {
		return configProblem("mysql.dsn is empty: say where the database is, in LAPSE_MYSQL_DSN; scripts/stack up && eval \"$(scripts/stack env)\" brings one up")
	}
	bench.DSN = cfg.MySQL.DSN
	bench.DSNMigrate, bench.DSNRelay = cmp.Or(cfg.MySQL.DSNMigrate, cfg.MySQL.DSN), cmp.Or(cfg.MySQL.DSNRelay, cfg.MySQL.DSN)
	bench.DSNConsume, bench.DSNRead = cmp.Or(cfg.MySQL.DSNConsume, cfg.MySQL.DSN), cmp.Or(cfg.MySQL.DSNRead, cfg.MySQL.DSN)
	bench.DSNReconcile, bench.DSNReplica = cmp.Or(cfg.MySQL.DSNReconcile, cfg.MySQL.DSN), cfg.MySQL.DSNReplica
	// From the environment alone: every user of the machine can read a flag.
	bench.DSNReplicaAdmin = a.getenv("LAPSE_TEST_REPLICA_ADMIN_DSN")
	bench.Reconcile = []trial.Setting{
		{Name: "lapse reconcile.batch", Value: strconv.Itoa(cfg.Reconcile.Batch)},
		{Name: "lapse reconcile.workers", Value: strconv.Itoa(cfg.Reconcile.Workers)},
		{Name: "lapse reconcile.page", Value: strconv.Itoa(cfg.Reconcile.Page)},
	}
	bench.RocketMQ = (&service{cfg: cfg}).rocketmq()
	bench.RocketMQ.Registerer = nil
	bench.BrokerAdmin = cmp.Or(bench.BrokerAdmin, a.getenv("LAPSE_TEST_BROKER_ADMIN"))
	bench.NameServer = a.getenv("LAPSE_TEST_NAMESRV_ADMIN") // set where the stack is in containers
	bench.BatchOrders, bench.Tick = cfg.Consumer.BatchOrders, cfg.Relay.Tick
	if bench.Binary, err = os.Executable(); err != nil {
		return fmt.Errorf("find the binary to start: %w", err)
	}
	if a.configFile != "" {
		bench.Args = append(bench.Args, "--config", a.configFile)
	}
	for _, s := range a.set {
		bench.Args = append(bench.Args, "--set", s)
	}
	bench.Env, bench.Getenv, bench.Out = a.environ, a.getenv, a.stdout
	return nil
}
