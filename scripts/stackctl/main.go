// Command stackctl does what scripts/stack cannot do in bash: it speaks to MySQL and to RocketMQ. The development stack uses it and nothing
// else does, so it knows only what the stack needs.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdin)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "stackctl: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdin io.Reader) error {
	if len(args) == 0 {
		return errors.New("use: stackctl sql [-e statement] [--expect value] | stackctl broker --endpoints … --broker … --topic … --group …")
	}
	switch args[0] {
	case "sql":
		return runSQL(ctx, args[1:], stdin)
	case "broker":
		return runBroker(ctx, args[1:])
	}
	return fmt.Errorf("unknown command %q: sql or broker", args[0])
}

// runSQL executes a statement, or the script on standard input, as the account in STACKCTL_DSN. With --expect the statement is a query whose
// single value must be the one given.
func runSQL(ctx context.Context, args []string, stdin io.Reader) error {
	flags := flag.NewFlagSet("sql", flag.ContinueOnError)
	statement := flags.String("e", "", "statement; without it, a script is read from standard input")
	expect := flags.String("expect", "", "the single value that the query must return")
	if err := flags.Parse(args); err != nil {
		return err
	}
	cfg, err := mysql.ParseDSN(os.Getenv("STACKCTL_DSN"))
	if err != nil {
		return fmt.Errorf("read STACKCTL_DSN: %w", err)
	}
	cfg.MultiStatements = true
	cfg.Timeout = 3 * time.Second
	// A server that is just coming up refuses connections by the dozen; the stack asks again, so the driver need not report each.
	cfg.Logger = silent{}
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	db := sql.OpenDB(connector)
	defer db.Close()

	script := *statement
	if script == "" {
		text, err := io.ReadAll(stdin)
		if err != nil {
			return fmt.Errorf("read the script: %w", err)
		}
		script = string(text)
	}
	if *expect == "" {
		if _, err := db.ExecContext(ctx, script); err != nil {
			return fmt.Errorf("execute on %s: %w", cfg.Addr, err)
		}
		return nil
	}
	var value sql.NullString
	if err := db.QueryRowContext(ctx, script).Scan(&value); err != nil {
		return fmt.Errorf("query %s: %w", cfg.Addr, err)
	}
	if value.String != *expect {
		return fmt.Errorf("%s answers %q to %q, want %q", cfg.Addr, value.String, script, *expect)
	}
	return nil
}

type silent struct{}

func (silent) Print(...any) {}

// runBroker verifies that the proxy's route of the topic says DELAY.
func runBroker(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("broker", flag.ContinueOnError)
	endpoints := flags.String("endpoints", "", "host:port of the gRPC proxy")
	_ = flags.String("broker", "", "host:port of the broker's remoting server")
	topic := flags.String("topic", "", "topic of type DELAY")
	_ = flags.String("group", "", "consumer group")
	if err := flags.Parse(args); err != nil {
		return err
	}
	// The proxy keeps "topic not found" for 20 s after a look-up that came too early.
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	conn, err := grpc.NewClient(*endpoints, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("proxy %s: %w", *endpoints, err)
	}
	defer conn.Close()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		err := delayRoute(ctx, conn, *endpoints, *topic)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("route of topic %s at %s, for 30 s: %w", *topic, *endpoints, err)
		case <-tick.C:
		}
	}
}

// delayRoute asks the proxy for the topic's route and fails unless every queue accepts timed messages.
func delayRoute(ctx context.Context, conn *grpc.ClientConn, endpoints, topic string) error {
	host, portText, err := net.SplitHostPort(endpoints)
	if err != nil {
		return err
	}
	port, err := strconv.ParseInt(portText, 10, 32)
	if err != nil {
		return fmt.Errorf("port of %s: %w", endpoints, err)
	}
	ctx = metadata.AppendToOutgoingContext(ctx, "x-mq-client-id", "lapse-stack", "x-mq-language", "GO", "x-mq-protocol", "v2", "x-mq-client-version", "5.1.4")
	answer, err := v2.NewMessagingServiceClient(conn).QueryRoute(ctx, &v2.QueryRouteRequest{
		Topic: &v2.Resource{Name: topic},
		Endpoints: &v2.Endpoints{
			Scheme:    v2.AddressScheme_IPv4,
			Addresses: []*v2.Address{{Host: host, Port: int32(port)}},
		},
	})
	if err != nil {
		return err
	}
	if answer.GetStatus().GetCode() != v2.Code_OK {
		return fmt.Errorf("%s: %s", answer.GetStatus().GetCode(), answer.GetStatus().GetMessage())
	}
	if len(answer.GetMessageQueues()) == 0 {
		return errors.New("no queues")
	}
	for _, q := range answer.GetMessageQueues() {
		var types []string
		delay := false
		for _, t := range q.GetAcceptMessageTypes() {
			types = append(types, t.String())
			delay = delay || t == v2.MessageType_DELAY
		}
		if !delay {
			return fmt.Errorf("queue %d accepts %s, want DELAY", q.GetId(), strings.Join(types, ", "))
		}
	}
	return nil
}
