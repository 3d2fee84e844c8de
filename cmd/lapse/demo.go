package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/internal/trial"
)

func (a *app) demoCmd() *cobra.Command {
	var asJSON bool
	demo := trial.DemoConfig{}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run a shop against real servers for half a minute, and check every invariant",
		Long: `Starts a relay, two consumers and lapse refund as processes of their own, and plays a shop that places orders through
the SDK. Its customers pay early, in the last 50 ms, late, twice, too little or too much, report a payment three times,
cancel by hand, get an extension, or never pay; two articles run out. In the middle one consumer is killed with SIGKILL
and started again. What must not stay goes back through lapse refund and a payment service that the demo plays, too; it
is left out where the database has payments of another gateway. When every order is final, reconcile looks on the
replica for what was missed, the database is audited, and compared with what the shop was told.

With --lose 5 a go-between stands before the broker and loses 5 % of the relay's messages: it says that they are stored,
and never sends them on. Their orders stay unpaid past their deadlines, until reconcile cancels exactly those.

It needs MySQL with lapse's tables and RocketMQ, and for --lose a replica (mysql.dsn_replica), without which reconcile
is left out; 'make demo' brings them up. It may run beside other work in the same database: its orders have a channel
and stock of their own. With --timeout 30m it is the real thing.`,
		Example: `  lapse demo
  lapse demo --orders 400 --rate 20 --timeout 10s --seed 1
  lapse demo --lose 5
  lapse demo --json >result.json`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			cfg, err := a.load(cmd)
			if err != nil {
				return err
			}
			demo.DSN, demo.ReadDSN = cfg.MySQL.DSN, cmp.Or(cfg.MySQL.DSNRead, cfg.MySQL.DSN)
			demo.ReplicaDSN = cfg.MySQL.DSNReplica
			demo.RocketMQ, demo.Topic = (&service{cfg: cfg}).rocketmq(), cfg.RocketMQ.Topic
			if demo.Binary, err = os.Executable(); err != nil {
				return fmt.Errorf("find the binary to start: %w", err)
			}
			demo.Env, demo.Getenv = a.environ, a.getenv
			if a.configFile != "" {
				demo.Args = append(demo.Args, "--config", a.configFile)
			}
			for _, s := range a.set {
				demo.Args = append(demo.Args, "--set", s)
			}
			demo.Out = a.stdout
			if asJSON {
				demo.Out = a.stderr
			}
			report, err := trial.Demo(cmd.Context(), demo)
			switch {
			case errors.Is(err, trial.ErrUsage):
				return usageError{err}
			case errors.Is(err, trial.ErrMissing):
				return codeError{err, exitMissing}
			}
			broken := errors.Is(err, trial.ErrBroken)
			if err == nil || broken {
				fmt.Fprintln(demo.Out)
				if asJSON {
					encoder := json.NewEncoder(a.stdout)
					encoder.SetIndent("", "  ")
					err = errors.Join(err, encoder.Encode(report))
				} else {
					err = errors.Join(err, report.Print(a.stdout, trial.StyleOf(a.stdout, a.getenv)))
				}
			}
			fmt.Fprintln(demo.Out, "The processes of the demo have ended.\nThe servers stay up; 'make stack-down' or 'scripts/stack down' stops them.")
			if broken {
				return codeError{err, exitInvariant}
			}
			return err
		}),
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.IntVar(&demo.Orders, "orders", 400, "`number` of orders")
	flags.Float64Var(&demo.Rate, "rate", 20, "orders a `second`")
	flags.DurationVar(&demo.Timeout, "timeout", 10*time.Second, "`time` from placing to the deadline")
	flags.Uint64Var(&demo.Seed, "seed", 1, "`seed` of the customers; the same one gives the same customers")
	flags.Float64Var(&demo.Lose, "lose", 0, "`percent` of the messages to lose on purpose, for reconcile to find")
	flags.BoolVar(&asJSON, "json", false, "print one JSON object on stdout, and the progress on stderr")
	return cmd
}
