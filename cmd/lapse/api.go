package main

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/internal/api"
)

func (a *app) apiCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "api",
		Short: "Serve the HTTP API, until told to stop",
		Long: `Serves the API for shops that are not written in Go: orders are placed, paid, extended, cancelled and read with JSON
over HTTP. GET /openapi.yaml describes it. It runs until SIGTERM or SIGINT, and then answers what it has taken.
Several may run. It talks to the database only: a relay and a consumer have to run as well, see lapse all.

Bearer tokens with scopes come from api.tokens. Without any the API is served on the loopback only; another address
is refused. Payment notices are signed where api.payment_secret is set. It speaks plain HTTP: for a network put a
proxy that ends TLS before it. /healthz, /readyz and /metrics are at http.addr, as for the other services.

It works on the database as mysql.dsn.`,
		Example: `  export LAPSE_MYSQL_DSN='lapse:secret@tcp(db:3306)/lapse'
  lapse api
  LAPSE_API_TOKENS_FILE=/run/secrets/tokens lapse api --api-addr 0.0.0.0:9880
  lapse health api`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			return a.serve(cmd, "api", roleAPI, assembleAPI)
		}),
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	apiFlag(cmd)
	webFlags(cmd)
	return cmd
}

func apiFlag(cmd *cobra.Command) {
	cmd.Flags().String("api-addr", "", "`host:port` of the API; of the loopback where there are no tokens (key api.addr)")
}

func assembleAPI(s *service) (*parts, error) {
	cfg, err := s.apiConfig()
	if err != nil {
		return nil, err
	}
	addr := s.cfg.API.Addr
	if err := api.CheckAddr(addr, cfg.Tokens); err != nil {
		if errors.Is(err, api.ErrOpen) {
			err = fmt.Errorf("api.addr is %s%s: %w; set api.tokens (LAPSE_API_TOKENS or LAPSE_API_TOKENS_FILE), or serve at 127.0.0.1", addr, s.cfg.by("api.addr"), err)
		}
		return nil, err
	}
	server, err := api.New(s.store, cfg)
	if err != nil {
		return nil, err
	}
	var l net.Listener
	return &parts{
		// After everything was made: whoever listens and does not answer keeps its clients waiting.
		open: func(ctx context.Context) (err error) {
			if l, err = api.Listen(ctx, addr, cfg.Tokens); err != nil {
				return codeError{fmt.Errorf("serve the API: %w; another address is set by the key api.addr", err), exitFailed}
			}
			s.log.Info("serving api", "addr", l.Addr().String(), "tokens", len(cfg.Tokens), "signed_payments", len(cfg.PaymentSecrets) > 0)
			return nil
		},
		run:    []func(context.Context) error{func(ctx context.Context) error { return server.Serve(ctx, l) }},
		checks: []check{{name: checkAPI, ready: func(context.Context) error { return server.Ready() }}},
	}, nil
}

func (s *service) apiConfig() (api.Config, error) {
	c := s.cfg.API
	cfg := api.Config{
		MaxBody:        c.MaxBody,
		MaxInFlight:    c.MaxInFlight,
		RequestTimeout: c.RequestTimeout,
		ReadTimeout:    c.ReadTimeout,
		IdleTimeout:    c.IdleTimeout,
		StopTimeout:    s.drain(),
		Logger:         s.log,
		Registerer:     s.reg,
	}
	var err error
	if c.Tokens != "" {
		if cfg.Tokens, err = api.ParseTokens(c.Tokens); err != nil {
			return cfg, fmt.Errorf("api.tokens: %w", err)
		}
	}
	if c.PaymentSecret != "" {
		if cfg.PaymentSecrets, err = api.ParseSecrets(c.PaymentSecret); err != nil {
			return cfg, fmt.Errorf("api.payment_secret: %w", err)
		}
	}
	return cfg, nil
}
