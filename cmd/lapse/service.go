package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
)

// service is a process that works until it is told to stop: relay, consume, api or all of them.
type service struct {
	name  string
	cfg   *effective
	log   *slog.Logger
	reg   *prometheus.Registry
	store *orders.Store
	// until is when a service that was told to stop has to have ended; zero before.
	until time.Time
}

// parts is what a service runs. All of it is made before anything starts, so that a wrong configuration ends the process at once and
// everything else is waited for.
type parts struct {
	// run are the loops. Each returns when its context ends and what it has in hand is finished.
	run []func(context.Context) error
	// close are the broker's clients; they are closed when every loop has returned.
	close  []func(context.Context) error
	checks []check
	// open, where it is set, takes the address that the service is asked at; last of all, before the loops start.
	open func(context.Context) error
	// stores beside the service's own; closed with it.
	stores []*orders.Store
	// pools are other connections to databases; they are closed with the stores.
	pools []func() error
}

// serve runs a service from its configuration to its end. The order of the end is what keeps work from being lost or done twice: the loops
// take nothing more and finish what they have, then the clients of the broker are closed (which gives back what they had received and
// nobody took), the database last.
func (a *app) serve(cmd *cobra.Command, name string, r role, assemble func(*service) (*parts, error)) (err error) {
	cfg, err := a.read(cmd)
	if err != nil {
		return err
	}
	s := &service{name: name, cfg: cfg, log: newLogger(a.stderr, cfg.Log.Level, cfg.Log.Format).With("service", name)}
	for _, w := range cfg.warnings {
		s.log.Warn(w)
	}
	if s.reg, err = newRegistry(); err != nil {
		return err
	}
	if s.store, err = a.open(cfg, r); err != nil {
		return err
	}
	stuck := false
	stores := []*orders.Store{s.store}
	var pools []func() error
	var w *web
	defer func() {
		if w != nil {
			w.close() // it answers until the clients are closed: a probe sees a process that is stopping, not one that hangs
		}
		if stuck {
			return // closing the database under work that goes on would only add errors to its end
		}
		for _, store := range stores {
			err = errors.Join(err, store.Close())
		}
		for _, closePool := range pools {
			err = errors.Join(err, closePool())
		}
		if err == nil {
			s.log.Info("stopped")
		}
	}()

	p, err := assemble(s)
	if p != nil {
		stores = append(stores, p.stores...)
		pools = p.pools
		// Also after an error: a client that was made connects in the background.
		defer func() {
			if stuck {
				return
			}
			if failed := s.closeClients(p); failed != nil {
				s.log.Warn("the clients of the broker were not closed in order", "err", failed)
			}
		}()
	}
	var known *configError
	if errors.As(err, &known) {
		return err
	}
	if err != nil {
		return &configError{[]error{err}}
	}
	sampler := newSampler(s.log, stores...)
	if err := s.reg.Register(sampler); err != nil {
		return err
	}
	watch, err := newWatch(name, append([]check{{name: checkDatabase, ready: allReady(stores)}}, p.checks...), s.log, s.reg)
	if err != nil {
		return err
	}
	addr := cfg.HTTP.Addr
	if addr == "" {
		addr = defaultAddr[name]
	}
	w, err = serveWeb(cmd.Context(), addr, cfg.HTTP.Pprof, watch, s.reg, s.log)
	if err != nil {
		return err
	}
	dsn, err := cfg.dsn(r)
	if err != nil {
		return err
	}
	if p.open != nil {
		if err := p.open(cmd.Context()); err != nil {
			return err
		}
	}
	attrs := []any{"version", readBuild().Version, "database", mask(dsn)}
	if len(p.close) > 0 {
		attrs = append(attrs, "broker", cfg.RocketMQ.Endpoints, "topic", cfg.RocketMQ.Topic)
	}
	s.log.Info("started", attrs...)

	stuck, err = s.work(cmd.Context(), p, watch, sampler)
	return err
}

// allReady is nil when every store can work.
func allReady(stores []*orders.Store) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, store := range stores {
			if err := store.Ready(ctx); err != nil {
				return err
			}
		}
		return nil
	}
}

// work runs the loops until ctx ends and they have returned; stuck says that one had not within the grace, and still runs.
func (s *service) work(ctx context.Context, p *parts, watch *watch, sampler *sampler) (stuck bool, err error) {
	group, groupCtx := errgroup.WithContext(ctx)
	var beside sync.WaitGroup
	besideCtx, stopBeside := context.WithCancel(groupCtx)
	beside.Go(func() { watch.run(besideCtx) })
	beside.Go(func() { sampler.run(besideCtx) })
	defer beside.Wait()
	defer stopBeside()

	for _, run := range p.run {
		group.Go(func() error { return run(groupCtx) })
	}
	done := make(chan error, 1)
	go func() { done <- group.Wait() }() // ends with the loops
	select {
	case err := <-done:
		return false, err
	case <-ctx.Done():
	}
	grace := s.cfg.Shutdown.Grace
	s.until = time.Now().Add(grace)
	s.log.Info("stopping: finishing what is in hand", "grace", grace)
	limit := time.NewTimer(grace)
	defer limit.Stop()
	select {
	case err := <-done:
		return false, err
	case <-limit.C:
		return true, codeError{fmt.Errorf("what was in hand is not finished after shutdown.grace, %s; it will be done by another process, or by this one when it runs again", grace), exitFailed}
	}
}

// drain is the part of the grace in which the loops finish their work; the rest is for closing the clients.
func (s *service) drain() time.Duration {
	return s.cfg.Shutdown.Grace - min(s.cfg.Shutdown.Grace/4, 3*time.Second)
}

// closeClients closes the clients of the broker side by side. That of the dead letters has a long poll under way, which takes up to 7 s to
// end by itself; what is left of the grace bounds it.
func (s *service) closeClients(p *parts) error {
	until := s.until
	if until.IsZero() {
		until = time.Now().Add(s.cfg.Shutdown.Grace) // it ends by itself, not by a signal
	}
	ctx, cancel := context.WithDeadline(context.Background(), until)
	defer cancel()
	var group errgroup.Group
	for _, closeClient := range p.close {
		group.Go(func() error { return closeClient(ctx) })
	}
	return group.Wait()
}

// rocketmq is how the service reaches the broker.
func (s *service) rocketmq() rmq.Config {
	c := s.cfg.RocketMQ
	return rmq.Config{
		Endpoints:      c.Endpoints,
		Namespace:      c.Namespace,
		AccessKey:      c.AccessKey,
		SecretKey:      c.SecretKey,
		SecurityToken:  c.SecurityToken,
		RequestTimeout: c.RequestTimeout,
		TLS: rmq.TLS{
			Disabled:           !c.TLS.Enabled,
			CAFile:             c.TLS.CAFile,
			ServerName:         c.TLS.ServerName,
			InsecureSkipVerify: c.TLS.InsecureSkipVerify,
			CertFile:           c.TLS.CertFile,
			KeyFile:            c.TLS.KeyFile,
		},
		Logger:     s.log,
		Registerer: s.reg,
	}
}

// serviceFlags are the flags of the services that talk to the broker.
func serviceFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.SortFlags = false
	webFlags(cmd)
	flags.String("endpoints", "", "`host:port` of the RocketMQ proxy, several with semicolons (key rocketmq.endpoints)")
	flags.String("topic", "", "`topic` of the timed messages (key rocketmq.topic)")
}

// webFlags are the flags of every service.
func webFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.String("http-addr", "", "`host:port` of /healthz, /readyz and /metrics; default "+defaultAddr[cmd.Name()]+" (key http.addr)")
	flags.String("shutdown-grace", "", "`duration` to finish what is in hand after a signal (key shutdown.grace)")
}
