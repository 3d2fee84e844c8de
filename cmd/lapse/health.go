package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/spf13/cobra"
)

// Default addresses of what the services serve: each its port, so that all run on one host without a word of configuration.
var defaultAddr = map[string]string{
	"relay":     "127.0.0.1:9870",
	"consume":   "127.0.0.1:9871",
	"api":       "127.0.0.1:9872",
	"all":       "127.0.0.1:9873",
	"refund":    "127.0.0.1:9875",
	"reconcile": "127.0.0.1:9874",
}

// maxAnswer bounds what is read of an answer; ours has some hundred bytes.
const maxAnswer = 1 << 20

func (a *app) healthCmd() *cobra.Command {
	var live bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "health [relay|consume|api|all|refund|reconcile]",
		Short: "Ask a service on this host whether it can work",
		Long: `Asks a service on this host whether it can work (/readyz), for container health checks and for a person. It asks
at http.addr; where that is not set, at the default address of the service that is named.

It is 0 when the service is ready, 1 when it answers that something is missing (which is printed), 3 when
nothing answers. With --live it asks only whether the process is alive (/healthz): a restart cures no database
that is down, so a liveness probe should use this.`,
		Example: `  lapse health relay
  lapse health consume --live
  lapse health --http-addr 127.0.0.1:9870 --timeout 1s`,
		ValidArgs: []string{"relay", "consume", "api", "all", "refund", "reconcile"},
		Args: func(cmd *cobra.Command, args []string) error {
			a.command = pathBelowRoot(cmd)
			if len(args) > 1 {
				return usage("unexpected argument %q", args[1])
			}
			if len(args) == 1 && defaultAddr[args[0]] == "" {
				return usage("health of %q: say relay, consume, api, all, refund or reconcile", args[0])
			}
			return nil
		},
		RunE: a.begin(func(cmd *cobra.Command, args []string) error {
			cfg, err := a.read(cmd) // its warnings would come again with every probe
			if err != nil {
				return err
			}
			if timeout <= 0 {
				return usage("--timeout %s: it must be positive", timeout)
			}
			addr := cfg.HTTP.Addr
			if addr == "" && len(args) == 1 {
				addr = defaultAddr[args[0]]
			}
			if addr == "" {
				return usage("say which service: lapse health relay, consume, api, reconcile, refund or all, or --http-addr host:port")
			}
			path := "/readyz"
			if live {
				path = "/healthz"
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return ask(ctx, a.stdout, "http://"+askAddr(addr)+path)
		}),
	}
	cmd.Flags().BoolVar(&live, "live", false, "ask only whether the process is alive")
	cmd.Flags().DurationVar(&timeout, "timeout", 3*time.Second, "how long to wait for the answer, as a `duration`")
	cmd.Flags().String("http-addr", "", "`host:port` to ask (key http.addr)")
	return cmd
}

// askAddr is where to ask a service that listens at addr: one that listens on all addresses is asked on the loopback.
func askAddr(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	ip := net.ParseIP(host)
	switch {
	case host == "" || ip != nil && ip.IsUnspecified() && ip.To4() != nil:
		host = "127.0.0.1"
	case ip != nil && ip.IsUnspecified():
		host = "::1"
	}
	return net.JoinHostPort(host, port)
}

// ask prints the answer of a probe and turns it into an error with its exit code.
func ask(ctx context.Context, stdout io.Writer, url string) (err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return usageError{err}
	}
	// No proxy of the environment: the process is on this host.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return codeError{fmt.Errorf("nothing answers: %w", err), exitMissing}
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return codeError{fmt.Errorf("read the answer of %s: %w", url, err), exitMissing}
	}
	var r readiness
	if json.Unmarshal(body, &r) == nil && len(r.Checks) > 0 {
		for _, c := range r.Checks {
			if c.Ready {
				fmt.Fprintf(stdout, "%s: ok\n", c.Name)
			} else {
				fmt.Fprintf(stdout, "%s: %s\n", c.Name, c.Missing)
			}
		}
	} else if _, err := stdout.Write(body); err != nil {
		return err
	}
	switch resp.StatusCode {
	case http.StatusOK:
		return nil
	case http.StatusServiceUnavailable:
		return codeError{errors.New("not ready"), exitFailed}
	}
	return codeError{fmt.Errorf("%s answers %s: is this lapse?", url, resp.Status), exitFailed}
}
