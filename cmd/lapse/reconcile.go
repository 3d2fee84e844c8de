package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/internal/reconcile"
	"github.com/lapse-orders/lapse/internal/trial"
	"github.com/lapse-orders/lapse/orders"
)

func (a *app) reconcileCmd() *cobra.Command {
	var o onceFlags
	cmd := &cobra.Command{
		Use:   "reconcile",
		Short: "Cancel, from a read replica's list, what the messages missed: each night, or once",
		Long: `Finds on a read replica the unpaid orders that are overdue, however long, and has them cancelled on the primary by the
same conditional update, through the same gateway check. It runs each night (reconcile.schedule, 02:30) until SIGTERM
or SIGINT; a night that was missed is caught up at the start. With --once it makes one run and ends.

A run writes a row on the primary and waits until the replica shows it (reconcile.max_lag). A replica that lags by
more, has stopped, or is no replica of this primary ends the run with exit code 3 before anything is read; with
--on-lag primary the primary is scanned instead, slower, and not audited. One run works at a time: a second one says so
and is done. A run that was killed is resumed by the next, and another one then looks at what came due since (--json
lists the first under resumed_runs). An order that cannot be cancelled is parked, and the run goes on.

Every nightly run ends with an audit of all invariants on the replica, --once does with --audit; findings are listed,
exit code 4. An order that had to be cancelled is one that the message path missed: the report and the order's story
say why.

It works on the database as mysql.dsn_reconcile; without it, as mysql.dsn; and reads as mysql.dsn_replica.`,
		Example: `  export LAPSE_MYSQL_DSN='lapse:secret@tcp(db:3306)/lapse' LAPSE_MYSQL_DSN_REPLICA='reader:secret@tcp(replica:3306)/lapse'
  lapse reconcile
  lapse reconcile --once --dry-run
  lapse reconcile --once --audit --json
  lapse reconcile --once --from 2026-11-29 --until '2026-11-30 12:00' --rate 500`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			if !o.once {
				for _, name := range []string{"dry-run", "audit", "json", "from", "until"} {
					if cmd.Flags().Changed(name) {
						return usage("--%s goes with --once: the nightly runs look at everything and end with an audit", name)
					}
				}
				return a.serve(cmd, "reconcile", roleReconcile, assembleReconcile)
			}
			return a.reconcileOnce(cmd, o)
		}),
	}
	webFlags(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&o.once, "once", false, "make one run, print its report and end")
	flags.BoolVar(&o.dryRun, "dry-run", false, "with --once: only count, cancel nothing")
	flags.BoolVar(&o.audit, "audit", false, "with --once, for a whole run: check the invariants at the end")
	flags.StringVar(&o.from, "from", "", "with --once: only deadlines from this `time` on, as 2026-11-30, '2026-11-30 12:00' (of reconcile.timezone) or RFC 3339")
	flags.StringVar(&o.until, "until", "", "with --once: only deadlines before this `time`")
	flags.BoolVar(&o.json, "json", false, "with --once: print one JSON object on stdout")
	flags.String("rate", "", "orders a `second` at most (key reconcile.rate)")
	flags.String("on-lag", "", "fail, or `primary`: scan the primary instead (key reconcile.on_lag)")
	for flag, name := range map[string]string{"rate": "reconcile.rate", "on-lag": "reconcile.on_lag"} {
		flags.Lookup(flag).Annotations = map[string][]string{keyOfFlag: {name}}
	}
	return cmd
}

// onceFlags are the flags of one run.
type onceFlags struct {
	once, dryRun, audit, json bool
	from, until               string
}

// openReplica makes the pool of the replica; nil without one. It dials nothing.
func openReplica(cfg *effective) (*orders.Store, error) {
	if cfg.MySQL.DSNReplica == "" {
		if cfg.Reconcile.OnLag != reconcile.OnLagPrimary {
			return nil, configProblem("the replica is not named: set LAPSE_MYSQL_DSN_REPLICA to user:password@tcp(host:port)/database, or LAPSE_MYSQL_DSN_REPLICA_FILE to a file with it; or reconcile.on_lag to primary, which scans the primary")
		}
		return nil, nil
	}
	c := cfg.ordersConfig()
	c.MaxOpenConns = 4
	// The audit's queries read whole tables and take as long as they take; all others have a limit of their own, reconcile's ReadTimeout.
	c.IOTimeout = day
	store, err := orders.Open(cfg.MySQL.DSNReplica, c)
	if err != nil {
		return nil, &configError{[]error{fmt.Errorf("mysql.dsn_replica: %w", err)}}
	}
	return store, nil
}

// reconciler makes the reconciler of a service, with a pool of its own for the replica, which close closes.
func (s *service) reconciler() (r *reconcile.Reconciler, closePool func() error, err error) {
	replica, err := openReplica(s.cfg)
	if err != nil {
		return nil, nil, err
	}
	closePool = func() error { return nil }
	var pool *sql.DB
	if replica != nil {
		pool, closePool = replica.DB(), replica.Close
	}
	through, err := s.canceller()
	if err != nil {
		return nil, closePool, err
	}
	r, err = reconcile.New(s.store, through, pool, s.reconcileConfig())
	return r, closePool, err
}

func assembleReconcile(s *service) (*parts, error) {
	r, closePool, err := s.reconciler()
	p := &parts{}
	if closePool != nil {
		p.pools = append(p.pools, closePool)
	}
	if err != nil {
		return p, err
	}
	next, err := r.Next()
	if err != nil {
		return p, err
	}
	s.log.Info("reconcile is scheduled", "schedule", s.cfg.Reconcile.Schedule, "timezone", s.cfg.Reconcile.Timezone, "next", next)
	p.run = []func(context.Context) error{r.Loop}
	if s.name == "reconcile" { // beside the API a replica that is down is no reason to take no orders
		p.checks = []check{{name: "replica", ready: r.Ready}}
	}
	return p, nil
}

func (s *service) reconcileConfig() reconcile.Config {
	c := s.cfg.Reconcile
	return reconcile.Config{
		Schedule:      c.Schedule,
		Timezone:      c.Timezone,
		Grace:         c.Grace,
		MaxLag:        c.MaxLag,
		OnLag:         c.OnLag,
		Page:          c.Page,
		Batch:         c.Batch,
		Workers:       c.Workers,
		Rate:          c.Rate,
		PrimaryRate:   c.PrimaryRate,
		MaxLockWaits:  c.MaxLockWaits,
		PauseLag:      c.PauseLag,
		Lease:         c.Lease,
		CancelTimeout: c.CancelTimeout,
		ReadTimeout:   s.cfg.MySQL.IOTimeout,
		OutboxAge:     c.OutboxAge,
		RetryAfter:    c.RetryAfter,
		Logger:        s.log,
		Registerer:    s.reg,
	}
}

// reconcileOnce makes one run; a second one if the first only ended what another process had begun. The audit of the last one is what is judged: it
// looks at everything that the one before looked at.
func (a *app) reconcileOnce(cmd *cobra.Command, o onceFlags) (err error) {
	cfg, err := a.load(cmd)
	if err != nil {
		return err
	}
	if o.audit && (o.dryRun || o.from != "" || o.until != "") {
		return usage("--audit does not go with --dry-run, --from or --until: the orders that such a run leaves as they are would be findings; make a whole run with --audit")
	}
	options := reconcile.Options{DryRun: o.dryRun, Audit: o.audit}
	if options.From, err = instantOf("--from", o.from, cfg.Reconcile.Timezone); err != nil {
		return err
	}
	if options.Until, err = instantOf("--until", o.until, cfg.Reconcile.Timezone); err != nil {
		return err
	}
	if !options.From.IsZero() && !options.Until.IsZero() && !options.From.Before(options.Until) {
		return usage("--from %s is not before --until %s", o.from, o.until)
	}
	bar := &bar{w: a.stderr, style: trial.StyleOf(a.stderr, a.getenv)}
	if isTerminal(a.stderr) && a.getenv("TERM") != "dumb" {
		options.Progress, options.Total = bar.show, true
	}
	format := cfg.Log.Format
	if format == "auto" && isTerminal(a.stderr) {
		format = "text"
	}
	s := &service{name: "reconcile", cfg: cfg, log: newLogger(bar, cfg.Log.Level, format).With("service", "reconcile")}
	if s.reg, err = newRegistry(); err != nil {
		return err
	}
	if s.store, err = a.open(cfg, roleReconcile); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.store.Close()) }()
	r, closePool, err := s.reconciler()
	if closePool != nil {
		defer func() { err = errors.Join(err, closePool()) }()
	}
	if err != nil {
		return err
	}
	var reports []reconcile.Report // the last one is of the run that looked at everything; those before it were resumed
	var itsFailure error           // of the last one
	for len(reports) == 0 || reports[len(reports)-1].Resumed {
		report, failure := r.Run(cmd.Context(), options)
		bar.erase()
		var other *reconcile.RunningError
		if errors.As(failure, &other) {
			fmt.Fprintf(a.stderr, "another reconcile is running: %s\n", other)
			break
		}
		if report.RunID != 0 {
			reports, itsFailure = append(reports, report), failure
		}
		// A run that is done and could not be audited is no reason to leave the orders that came due since.
		if failure != nil && (!report.Resumed || !errors.Is(failure, reconcile.ErrAudit)) {
			err = failure
			break
		}
	}
	if len(reports) == 0 {
		return ofReplica(err)
	}
	last := reports[len(reports)-1]
	if printed := a.printReports(o.json, reports, itsFailure); printed != nil {
		return errors.Join(err, printed)
	}
	if err == nil && last.Violations() > 0 {
		return codeError{fmt.Errorf("the audit found %d rows that break an invariant", last.Violations()), exitInvariant}
	}
	return ofReplica(err)
}

// ofReplica gives the failure of a run the exit code that it has.
func ofReplica(err error) error {
	if errors.Is(err, reconcile.ErrReplica) {
		return codeError{err, exitMissing}
	}
	return err
}

// instantOf reads a time of a flag; zero where the flag is not given.
func instantOf(flag, text, zone string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return time.Time{}, configProblem("reconcile.timezone: %w", err)
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02 15:04:05", "2006-01-02 15:04", time.DateOnly} {
		if at, err := time.ParseInLocation(layout, text, loc); err == nil {
			return at, nil
		}
	}
	return time.Time{}, usage("%s %q is no time: write 2026-11-30, '2026-11-30 12:00' or 2026-11-30T12:00:00Z", flag, text)
}

// printReports prints what a run did, also one that failed on its way, and before it what the runs did that were resumed.
func (a *app) printReports(asJSON bool, reports []reconcile.Report, failure error) error {
	before, report := reports[:len(reports)-1], reports[len(reports)-1]
	if asJSON {
		object := struct {
			reconcile.Report
			Violations int64              `json:"violations"`
			Error      string             `json:"error,omitempty"`
			Before     []reconcile.Report `json:"resumed_runs,omitempty"`
		}{report, report.Violations(), "", before}
		if failure != nil {
			object.Error = failure.Error()
		}
		encoder := json.NewEncoder(a.stdout)
		encoder.SetIndent("", "  ")
		return encoder.Encode(object)
	}
	for _, r := range before {
		if err := writeReport(a.stdout, r, nil); err != nil {
			return err
		}
	}
	return writeReport(a.stdout, report, failure)
}

func writeReport(w io.Writer, r reconcile.Report, failure error) error {
	var b strings.Builder
	ended, verb := "done", "cancelled"
	if failure != nil {
		ended = "not done"
	}
	what := ""
	if r.Resumed {
		what = ", which another process had begun,"
	}
	fmt.Fprintf(&b, "reconcile run %d (%s)%s is %s after %s\n", r.RunID, r.Kind, what, ended, r.Duration.Round(time.Millisecond))
	where := "the replica " + r.Server
	if r.Primary {
		where = "the primary " + r.Server
	}
	if r.Server != "" {
		fmt.Fprintf(&b, "  read from      %s, %s behind\n", where, r.Lag.Round(time.Millisecond))
	}
	fmt.Fprintf(&b, "  cut-off        %s\n", r.Cutoff.Format(time.RFC3339))
	fmt.Fprintf(&b, "  scanned     %7d\n", r.Scanned)
	if r.Kind != "dry" {
		fmt.Fprintf(&b, "  %s   %7d", verb, r.Cancelled)
		if r.Cancelled > 0 {
			fmt.Fprintf(&b, "   missed by the message path: %d never sent, %d sent and not received, %d parked", r.Missed.NeverSent, r.Missed.SentNotReceived, r.Missed.Parked)
		}
		fmt.Fprintf(&b, "\n  already paid%7d\n  held        %7d\n  parked      %7d\n  others      %7d\n", r.AlreadyPaid, r.Held, r.Parked, r.Others)
	}
	if r.Paused > 0 {
		fmt.Fprintf(&b, "  paused         %s, for payments and the replica\n", r.Paused.Round(time.Millisecond))
	}
	if r.NotAudited != "" {
		fmt.Fprintf(&b, "  audit          not made: %s\n", r.NotAudited)
	}
	if len(r.Audit) > 0 {
		fmt.Fprintf(&b, "  audit          %d checks, %d findings\n", len(r.Audit), r.Violations())
		for _, c := range r.Audit {
			if c.Violations == 0 {
				continue
			}
			fmt.Fprintf(&b, "    %s %s: %d; it should hold that %s\n", c.Invariant, c.Name, c.Violations, c.Says)
			for _, v := range c.Examples {
				who := "sku " + v.SKU
				if v.OrderID != 0 {
					who = "order " + orders.FormatID(v.OrderID)
				}
				fmt.Fprintf(&b, "      %s: %s\n", who, v.Detail)
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// bar shows a run's progress in the last line of a terminal, and lets the log pass above it.
type bar struct {
	w     io.Writer
	style trial.Style

	mu    sync.Mutex
	drawn bool // guarded by mu
}

// show draws.
func (b *bar) show(p reconcile.Progress) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.drawn = true
	fmt.Fprintf(b.w, "\r%s\x1b[K", barLine(p, b.style.Width))
}

// barLine is the progress in a line of less than width characters: one that wraps could not be drawn over.
func barLine(p reconcile.Progress, width int) string {
	words := fmt.Sprintf(" %d/%d, cancelled %d, paid %d, held %d, parked %d  %s", p.Scanned, p.Total, p.Cancelled, p.AlreadyPaid, p.Held, p.Parked, p.Elapsed.Round(time.Second))
	if p.Paused {
		words += "  paused"
	}
	cells := max(min(width-len(words)-3, 40), 0)
	full := cells
	if p.Total > 0 {
		full = int(min(p.Scanned, p.Total) * int64(cells) / p.Total)
	}
	line := []rune("[" + strings.Repeat("█", full) + strings.Repeat("░", cells-full) + "]" + words)
	return string(line[:min(len(line), max(width-1, 0))])
}

// Write lets a line of the log take the place of the bar.
func (b *bar) Write(p []byte) (int, error) {
	b.erase()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.w.Write(p)
}

func (b *bar) erase() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.drawn {
		b.drawn = false
		fmt.Fprint(b.w, "\r\x1b[K")
	}
}
