package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
)

// version is set by the linker (-X main.version=v0.1.0). A build by `go install module@version` has it in its build information.
var version string

// build is what is known of the binary.
type build struct {
	Version, Revision, Time string
	Modified                bool
}

func readBuild() build {
	b := build{Version: version}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if b.Version == "" {
		b.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.time":
			b.Time = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	if b.Version == "" {
		b.Version = "(devel)"
	}
	return b
}

func (a *app) versionCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of the binary, of its schema and of its messages",
		Long: `Prints the version of the binary, of the schema that it was made for, and of the timed messages that it writes.
A binary works on its own schema version and on the next one, so migrate first and restart then.`,
		Example: "  lapse version",
		Args:    a.exactly(),
		RunE: a.begin(func(*cobra.Command, []string) error {
			b := readBuild()
			fmt.Fprintf(a.stdout, "lapse %s\n", b.Version)
			if b.Revision != "" {
				changed := ""
				if b.Modified {
					changed = ", with changes that are not committed"
				}
				fmt.Fprintf(a.stdout, "revision %s of %s%s\n", b.Revision, b.Time, changed)
			}
			fmt.Fprintf(a.stdout, "schema %d, messages %d\n%s %s/%s\n", migrations.Version, orders.ExpiryVersion, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return nil
		}),
	}
}
