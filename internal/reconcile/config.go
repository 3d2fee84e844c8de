package reconcile

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// What to do when the replica lags, has stopped or cannot be reached.
const (
	OnLagFail    = "fail"    // end the run with [ErrReplica]
	OnLagPrimary = "primary" // scan the primary instead, at PrimaryRate
)

// Config has the settings of a [Reconciler]. The zero value of each field means its default.
type Config struct {
	// Schedule says when a run begins: five fields of cron, or @daily and its like, in the wall clock of Timezone. Default "30 2 * * *".
	Schedule string
	// Timezone names the zone, such as Asia/Shanghai; Local is that of the process. A time that the clocks skip runs when they have been
	// put forward, one that comes twice runs the first time. Default "Local".
	Timezone string
	// Grace is how long an order has to be overdue to be looked at: the message path gets its time first. Default 5 minutes.
	Grace time.Duration
	// MaxLag is how long a run waits for the replica to show what the run has written on the primary. Default 1 minute.
	MaxLag time.Duration
	// OnLag is OnLagFail or OnLagPrimary. Default OnLagFail.
	OnLag string
	// Page is how many orders one query reads, 1 to 1,000,000. Default 1,000.
	Page int
	// Batch is how many orders are cancelled in one transaction, 1 to 500: a payment may have to wait for the whole of it. Default 100.
	Batch int
	// Workers is how many of these transactions run at once. Default 2.
	Workers int
	// Rate is how many orders a second are cancelled at most. Default 2,000.
	Rate int
	// PrimaryRate takes the place of Rate while the primary is scanned, if it is lower. Default 500.
	PrimaryRate int
	// MaxLockWaits pauses a run while more transactions than this wait for row locks on the primary. Default 10.
	MaxLockWaits int
	// PauseLag pauses a run while the replica is further behind than this. One that falls behind by more than MaxLag ends the run.
	// Default 10 seconds.
	PauseLag time.Duration
	// Lease is how long a run that was killed keeps the next one from taking over. Default 1 minute.
	Lease time.Duration
	// CancelTimeout cuts off one transaction, and everything else that is asked of the primary. Default 10 seconds.
	CancelTimeout time.Duration
	// ReadTimeout cuts off one query on the replica, those of the audit apart. Default 30 seconds.
	ReadTimeout time.Duration
	// OutboxAge is how long an outbox row may wait to be sent before the audit lists it. Default 15 minutes.
	OutboxAge time.Duration
	// RetryAfter is how long the daemon waits after a run that failed, and for another one to end, before it looks again. Default 5 minutes.
	RetryAfter time.Duration
	// Logger gets what happens. Default: nil, silent.
	Logger *slog.Logger
	// Registerer gets the metrics. Default: nil, off.
	Registerer prometheus.Registerer
}

// WithDefaults gives the configuration with every zero field replaced by its default.
func (c Config) WithDefaults() Config {
	text := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	number := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	duration := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	text(&c.Schedule, "30 2 * * *")
	text(&c.Timezone, "Local")
	text(&c.OnLag, OnLagFail)
	duration(&c.Grace, 5*time.Minute)
	duration(&c.MaxLag, time.Minute)
	number(&c.Page, 1000)
	number(&c.Batch, 100)
	number(&c.Workers, 2)
	number(&c.Rate, 2000)
	number(&c.PrimaryRate, 500)
	number(&c.MaxLockWaits, 10)
	duration(&c.PauseLag, 10*time.Second)
	duration(&c.Lease, time.Minute)
	duration(&c.CancelTimeout, 10*time.Second)
	duration(&c.ReadTimeout, 30*time.Second)
	duration(&c.OutboxAge, 15*time.Minute)
	duration(&c.RetryAfter, 5*time.Minute)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if c.OnLag != OnLagFail && c.OnLag != OnLagPrimary {
		errs = append(errs, fmt.Errorf("OnLag is %q: must be %s or %s", c.OnLag, OnLagFail, OnLagPrimary))
	}
	for _, n := range []struct {
		name          string
		is, low, high int
	}{
		// 500 is what CancelDue does in one transaction.
		{"Page", c.Page, 1, 1_000_000}, {"Batch", c.Batch, 1, 500}, {"Workers", c.Workers, 1, 64}, {"Rate", c.Rate, 1, 1_000_000},
		{"PrimaryRate", c.PrimaryRate, 1, 1_000_000}, {"MaxLockWaits", c.MaxLockWaits, 1, 1_000_000},
	} {
		if n.is < n.low || n.is > n.high {
			errs = append(errs, fmt.Errorf("%s is %d: must be %d to %d", n.name, n.is, n.low, n.high))
		}
	}
	const day = 24 * time.Hour
	for _, d := range []struct {
		name          string
		is, low, high time.Duration
	}{
		{"Grace", c.Grace, time.Millisecond, day}, {"MaxLag", c.MaxLag, time.Millisecond, day}, {"PauseLag", c.PauseLag, time.Millisecond, day},
		{"Lease", c.Lease, time.Second, day}, {"CancelTimeout", c.CancelTimeout, 100 * time.Millisecond, time.Hour},
		{"ReadTimeout", c.ReadTimeout, time.Millisecond, day}, {"OutboxAge", c.OutboxAge, time.Second, 366 * day}, {"RetryAfter", c.RetryAfter, time.Millisecond, day},
	} {
		if d.is < d.low || d.is > d.high {
			errs = append(errs, fmt.Errorf("%s is %s: must be %s to %s", d.name, d.is, d.low, d.high))
		}
	}
	if _, err := parseSchedule(c.Schedule, c.Timezone); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
