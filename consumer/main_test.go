package consumer

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(clientGoroutines()...); err != nil {
			fmt.Fprintln(os.Stderr, "goroutines are left:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// clientGoroutines are those which the official RocketMQ client leaves behind, four for each consumer and producer of ours, and what it
// starts once for the process.
func clientGoroutines() []goleak.Option {
	const pkg = "github.com/apache/rocketmq-clients/golang/v5"
	return []goleak.Option{
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func1"),
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func2"),
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func3"),
		goleak.IgnoreAnyFunction(pkg + ".(*defaultClientManager).startUp.func4"),
		goleak.IgnoreAnyFunction(pkg + "/pkg/ticker.Tick.func1"),
		goleak.IgnoreAnyFunction("github.com/natefinch/lumberjack.(*Logger).millRun"),
		goleak.IgnoreAnyFunction("go.opencensus.io/stats/view.(*worker).start"),
	}
}
