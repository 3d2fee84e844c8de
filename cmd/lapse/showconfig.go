package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/lapse-orders/lapse/configs"
)

func (a *app) configCmd() *cobra.Command {
	var defaults bool
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print the configuration that is in effect, and where it came from",
		Long: `Prints the configuration that a command started in the same way would work with, as YAML. What differs from the
default says where it came from. Secrets are masked. A configuration that is refused is refused here too, so this
is also the way to check one before a restart.`,
		Example: `  lapse config
  lapse config --config lapse.yaml --set relay.senders=16
  lapse config --defaults > lapse.yaml   # every key, with its meaning`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			if defaults {
				_, err := a.stdout.Write(configs.Default)
				return err
			}
			cfg, err := a.load(cmd)
			if err != nil {
				return err
			}
			return cfg.print(a.stdout)
		}),
	}
	cmd.Flags().BoolVar(&defaults, "defaults", false, "print default.yaml instead: every key with its meaning and default")
	return cmd
}

// print writes the configuration as YAML, in the order of default.yaml.
func (e *effective) print(w io.Writer) error {
	var open []string // the sections that the last key was in
	var b strings.Builder
	for _, k := range keys {
		path := strings.Split(k.name, ".")
		sections, name := path[:len(path)-1], path[len(path)-1]
		for depth, s := range sections {
			if depth < len(open) && open[depth] == s {
				continue
			}
			open = open[:min(depth, len(open))]
			if depth == 0 && b.Len() > 0 {
				b.WriteByte('\n')
			}
			fmt.Fprintf(&b, "%s%s:\n", strings.Repeat("  ", depth), s)
			open = append(open, s)
		}
		open = open[:len(sections)]
		words, err := e.show(k)
		if err != nil {
			return fmt.Errorf("print %s: %w", k.name, err)
		}
		fmt.Fprintf(&b, "%s%s: %s", strings.Repeat("  ", len(sections)), name, words)
		if origin := e.origins[k.name]; origin != "" {
			fmt.Fprintf(&b, "  # from %s", origin)
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// show writes one value as it would stand in a YAML file; a secret is masked.
func (e *effective) show(k key) (string, error) {
	switch v := e.values[k.name].(type) {
	case time.Duration:
		if k.never && v == 0 {
			return "never", nil
		}
		return short(v), nil
	case bool:
		return strconv.FormatBool(v), nil
	case int64:
		return strconv.FormatInt(v, 10), nil
	case string:
		switch {
		case k.secret && strings.HasPrefix(k.name, "mysql."):
			v = mask(v)
		case k.secret && v != "":
			v = masked
		case strings.Contains(v, "\n"):
			out, err := json.Marshal(v) // on one line, behind which a comment can stand
			return string(out), err
		}
		out, err := yaml.Marshal(v)
		return strings.TrimSuffix(string(out), "\n"), err
	default:
		return "", fmt.Errorf("a value of type %T cannot be printed", v)
	}
}

const masked = "***"

// mask hides a secret, and the password only where it is in a DSN: which server and account are in effect is what one looks for.
func mask(s string) string {
	if s == "" {
		return ""
	}
	cfg, err := mysql.ParseDSN(s)
	if err != nil || cfg.DBName == "" {
		return masked
	}
	shown := cfg.Net + "(" + cfg.Addr + ")/" + cfg.DBName
	if cfg.User != "" {
		shown = cfg.User + ":" + masked + "@" + shown
	}
	return shown
}
