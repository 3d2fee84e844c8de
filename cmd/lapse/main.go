// Command lapse cancels orders that are still unpaid at their deadline: on time, exactly once, and with a proof.
//
// Checkout code imports package producer and needs no process of lapse to place orders. What has to run beside it is a relay, which turns
// outbox rows into timed messages, and consumers, which cancel what is due when the messages arrive; two of each, on different machines,
// survive the loss of one. Both start in any order, also before the database or the broker, and wait.
//
//	lapse migrate up      # once for each version, before the new processes start
//	lapse relay           # outbox -> broker
//	lapse consume         # broker -> cancel
//	lapse api             # orders over HTTP, for shops not written in Go
//	lapse refund          # gives back what must not stay, through the payment gateway
//	lapse all             # the three in one process, for small shops
//	lapse reconcile       # what the messages missed, from a read replica, each night
//	lapse cancel ORDER --reason '…'
//	lapse why ORDER       # why it is as it is, and what happened to it
//	lapse parked list     # what waits for a person; show, retry, discard
//	lapse doctor          # what is wrong with database, broker, replica, clocks and configuration
//	lapse health relay    # for container health checks
//	lapse config          # what is in effect, and where it came from
//
// It is one binary, so that every part of a deployment has the same version of the contract, and this package is wiring only: what the
// parts do is in relay, consumer and orders, which a shop can run in a process of its own instead.
//
// # Signals
//
// The first SIGTERM or SIGINT ends a process in good order: nothing more is received or claimed, what is in hand is finished within
// shutdown.grace, the broker's clients are closed, the database last. The exit code is 0 also when a consumer had to hand messages back that
// it could not finish, which the log says: another consumer does them. The second signal ends the process at once. Neither loses an order.
//
// # Exit codes
//
//	0  done
//	1  failed
//	2  wrong usage or configuration
//	3  a dependency is not there (the database, the broker, the process asked by health)
//	4  an invariant is broken
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
	// The time-zone database: an image of the binary alone has none, and TZ would be UTC without a word.
	_ "time/tzdata"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
)

// The exit codes; design and help text give the same list.
const (
	exitDone      = 0
	exitFailed    = 1
	exitUsage     = 2
	exitMissing   = 3
	exitInvariant = 4
)

// oneSignal is the time within which signals are one and the same: timeout(1) and some supervisors signal a process and then its group, of
// which it is a member, within a few milliseconds. Nobody presses Ctrl-C twice as fast.
const oneSignal = 200 * time.Millisecond

func main() {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() { // ends with the process
		<-signals
		first := time.Now()
		cancel()
		for s := range signals {
			if time.Since(first) < oneSignal {
				continue
			}
			fmt.Fprintf(os.Stderr, "lapse: second signal (%s): ended at once, with work in hand\n", s)
			os.Exit(exitFailed)
		}
	}()
	os.Exit(run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// run is the whole program but for the process around it. It returns when the command is done, or ctx has ended and the command with it.
func run(ctx context.Context, args, environ []string, stdout, stderr io.Writer) int {
	a := &app{environ: environ, stdout: stdout, stderr: stderr}
	err := a.checkTimeZone()
	if err == nil {
		root := a.root()
		root.SetArgs(args)
		err = root.ExecuteContext(ctx)
	}
	return a.exit(ctx, err)
}

// app is one run of the binary.
type app struct {
	environ        []string
	stdout, stderr io.Writer
	// global flags
	configFile string
	set        []string
	// begun says that the command line was understood; an error before that is one of usage.
	begun bool
	// command is the command that was begun, for the hint after an error.
	command string
}

func (a *app) getenv(name string) string {
	// The last one wins, as in a shell.
	for i := len(a.environ) - 1; i >= 0; i-- {
		if key, value, _ := strings.Cut(a.environ[i], "="); key == name {
			return value
		}
	}
	return ""
}

// checkTimeZone refuses a TZ that is not known. The Go runtime would take UTC for it and say nothing.
func (a *app) checkTimeZone() error {
	tz := strings.TrimPrefix(a.getenv("TZ"), ":")
	if tz == "" || tz == "UTC" {
		return nil
	}
	if strings.HasPrefix(tz, "/") {
		if _, err := os.Stat(tz); err != nil {
			return configProblem("TZ names the file %s: %w; unset TZ, or write a name such as Asia/Shanghai", tz, err)
		}
		return nil
	}
	if _, err := time.LoadLocation(tz); err != nil {
		return configProblem("TZ is %q, which is no time zone: unset it, or write a name such as Asia/Shanghai", tz)
	}
	return nil
}

// usageError is wrong usage that only the command itself can see.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// codeError is an error with an exit code of its own.
type codeError struct {
	error
	code int
}

func (e codeError) Unwrap() error { return e.error }

// exit prints an error where the user looks, and gives the exit code for it.
func (a *app) exit(ctx context.Context, err error) int {
	if err == nil {
		return exitDone
	}
	var (
		usageErr  usageError
		configErr *configError
		coded     codeError
	)
	code := exitFailed
	wrongConfig := errors.As(err, &configErr)
	switch {
	case !a.begun, wrongConfig, errors.As(err, &usageErr):
		code = exitUsage
	case errors.As(err, &coded):
		code = coded.code
	case ctx.Err() != nil:
		err = fmt.Errorf("interrupted: %w", err)
	case errors.Is(err, rmq.ErrNotReady), orders.IsUnavailable(err):
		code = exitMissing
	}
	if text := err.Error(); text != "" {
		fmt.Fprintf(a.stderr, "lapse: %s\n", text)
	}
	if code == exitUsage && !wrongConfig {
		fmt.Fprintf(a.stderr, "Try '%s --help'.\n", strings.TrimSpace("lapse "+a.command))
	}
	return code
}

// root is the command line.
func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "lapse COMMAND",
		Short: "Cancels orders that are still unpaid at their deadline: on time, exactly once, and with a proof",
		Long: `lapse cancels orders that are still unpaid at their deadline: on time, exactly once, and with a proof.

Checkout code places orders with the Go package producer. The relay turns them into timed messages of
RocketMQ 5; consumers cancel what is due when a message arrives, if it is still unpaid.`,
		Example: `  export LAPSE_MYSQL_DSN='lapse:secret@tcp(db:3306)/lapse' LAPSE_ROCKETMQ_ENDPOINTS=broker:8081
  lapse migrate up
  lapse relay
  lapse consume`,
		Version:           readBuild().Version,
		Args:              cobra.ArbitraryArgs,
		SilenceUsage:      true,
		SilenceErrors:     true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(cmd, args[0])
			}
			cmd.SetOut(a.stderr)
			return errors.Join(cmd.Help(), usage("no command given"))
		},
	}
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		a.command = pathBelowRoot(cmd)
		return usageError{err}
	})
	root.SetVersionTemplate("lapse {{.Version}}\n")
	root.SetUsageTemplate(usageTemplate)
	flags := root.PersistentFlags()
	flags.SortFlags = false
	flags.StringVar(&a.configFile, "config", "", "configuration `file` (YAML); default: $LAPSE_CONFIG, or none")
	flags.StringArrayVar(&a.set, "set", nil, "set one configuration key, as `key=value`; can be repeated")
	flags.String("log-level", "", "`level` of the log: debug, info, warn, error (key log.level)")
	flags.String("log-format", "", "`format` of the log: json, text, auto (key log.format)")
	root.AddCommand(
		a.migrateCmd(), a.relayCmd(), a.consumeCmd(), a.apiCmd(), a.refundCmd(), a.allCmd(), a.reconcileCmd(), a.cancelCmd(), a.whyCmd(), a.parkedCmd(), a.doctorCmd(), a.healthCmd(), a.demoCmd(), a.benchCmd(), a.configCmd(), a.versionCmd(),
	)
	return root
}

// keysOfFlags says which key a flag sets. Flags are for the settings that differ from one start to the next; all others have --set.
var keysOfFlags = map[string]string{
	"log-level":      "log.level",
	"log-format":     "log.format",
	"http-addr":      "http.addr",
	"api-addr":       "api.addr",
	"endpoints":      "rocketmq.endpoints",
	"topic":          "rocketmq.topic",
	"group":          "rocketmq.group",
	"shutdown-grace": "shutdown.grace",
}

// keyOfFlag is the annotation of a flag that sets a key in one command alone, where another command has a flag of that name for itself.
const keyOfFlag = "key"

// load reads the configuration for a command, with what its flags say, and prints its warnings.
func (a *app) load(cmd *cobra.Command) (*effective, error) {
	cfg, err := a.read(cmd)
	if err != nil {
		return nil, err
	}
	for _, w := range cfg.warnings {
		fmt.Fprintf(a.stderr, "lapse: warning: %s\n", w)
	}
	return cfg, nil
}

// read is load for whoever has another place for the warnings.
func (a *app) read(cmd *cobra.Command) (*effective, error) {
	src := sources{file: a.configFile, named: "--config", environ: a.environ, set: a.set}
	if !cmd.Flags().Changed("config") {
		src.file, src.named = a.getenv("LAPSE_CONFIG"), "LAPSE_CONFIG"
	} else if src.file == "" {
		return nil, usage("--config names no file")
	}
	for _, flag := range []string{"log-level", "log-format", "http-addr", "api-addr", "endpoints", "topic", "group", "shutdown-grace"} {
		if f := cmd.Flags().Lookup(flag); f != nil && f.Changed {
			src.flags = append(src.flags, assignment{key: keysOfFlags[flag], words: f.Value.String(), origin: "--" + flag})
		}
	}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		for _, name := range f.Annotations[keyOfFlag] {
			src.flags = append(src.flags, assignment{key: name, words: f.Value.String(), origin: "--" + f.Name})
		}
	})
	return load(src)
}

// begin wraps the work of a command: whatever fails from here on is no longer the command line's fault.
func (a *app) begin(do func(cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		a.begun, a.command = true, pathBelowRoot(cmd)
		return do(cmd, args)
	}
}

// exactly is cobra.ExactArgs with a text that says what is missing.
func (a *app) exactly(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		a.command = pathBelowRoot(cmd)
		if len(args) < len(names) {
			return usage("%s is missing", names[len(args)])
		}
		if len(args) > len(names) {
			return usage("unexpected argument %q", args[len(names)])
		}
		return nil
	}
}

// group is the RunE of a command that only has subcommands.
func (a *app) group(cmd *cobra.Command, args []string) error {
	a.command = pathBelowRoot(cmd)
	if len(args) > 0 {
		return unknownCommand(cmd, args[0])
	}
	var names []string
	for _, c := range cmd.Commands() {
		names = append(names, c.Name())
	}
	return usage("say which: lapse %s %s", pathBelowRoot(cmd), strings.Join(names, "|"))
}

func unknownCommand(cmd *cobra.Command, name string) error {
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	hint := ""
	if like := nearest(name, names); like != "" {
		hint = fmt.Sprintf("; did you mean %q?", like)
	}
	return usage("there is no command %q%s", strings.TrimSpace(pathBelowRoot(cmd)+" "+name), hint)
}

func pathBelowRoot(cmd *cobra.Command) string {
	return strings.TrimSpace(strings.TrimPrefix(cmd.CommandPath(), "lapse"))
}

// usageTemplate is cobra's, shorter, and with what is the same for every command at its end.
const usageTemplate = `Usage:
  {{if .Runnable}}{{.UseLine}}{{else}}{{.CommandPath}} COMMAND{{end}}
{{if .HasExample}}
Examples:
{{.Example}}
{{end}}{{if .HasAvailableSubCommands}}
Commands:{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}
{{end}}{{if .HasAvailableLocalFlags}}
Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}
{{end}}{{if .HasAvailableInheritedFlags}}
Flags of every command:
{{.InheritedFlags.FlagUsages | trimTrailingWhitespaces}}
{{end}}
Configuration: one YAML file, then the environment, then flags, then --set; the later wins. Each key has a
variable: LAPSE_ and the key in capitals, _ for the dot (relay.max_delay: LAPSE_RELAY_MAX_DELAY). A secret
can be in a file: LAPSE_MYSQL_DSN_FILE. 'lapse config' prints what is in effect, 'lapse config --defaults'
every key with its meaning.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 a dependency is not there,
4 an invariant is broken.
`
