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

	"github.com/lapse-orders/lapse/internal/rmq/admin"
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
		return errors.New("use: stackctl sql [-e statement] [--expect value] | stackctl broker --endpoints … --broker … --topic … --group … --precision …")
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
	defer db.Close() //nolint:errcheck // nothing is left to lose

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

// runBroker makes sure that the topic and the group are there as lapse needs them, that the group will get every message, and that clients are
// told so: it repairs what is missing, refuses what is different, and waits for the proxy's route.
func runBroker(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("broker", flag.ContinueOnError)
	endpoints := flags.String("endpoints", "", "host:port of the gRPC proxy")
	broker := flags.String("broker", "", "host:port of the broker's remoting server")
	namesrv := flags.String("namesrv", "", "host:port of the name server, where it is another for us than for the broker")
	topic := flags.String("topic", "", "topic of type DELAY, created with 8 queues if missing")
	group := flags.String("group", "", "consumer group, created with 16 retries if missing; likewise the group for its dead letters, with -dlq behind the name and 1000 retries")
	doctorTopic := flags.String("doctor-topic", "", "topic of type DELAY for the messages of lapse doctor, created with 2 queues if missing")
	doctorGroup := flags.String("doctor-group", "", "group for them, created with 16 retries if missing")
	eventsTopic := flags.String("events-topic", "", "topic of type NORMAL for the events of orders, created with 8 queues if missing")
	precision := flags.String("precision", "", "timerPrecisionMs that the broker must have in force")
	if err := flags.Parse(args); err != nil {
		return err
	}
	// The proxy keeps "topic not found" for 20 s after a look-up that came too early.
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()

	var nameServers []string
	if *namesrv != "" {
		nameServers = []string{*namesrv}
	}
	client := admin.New(*broker, nameServers...)
	if err := checkConfig(ctx, client, *precision); err != nil {
		return err
	}
	if err := ensure(ctx, client, *topic, *group); err != nil {
		return err
	}
	if err := ensureDoctor(ctx, client, *doctorTopic, *doctorGroup); err != nil {
		return err
	}
	if *eventsTopic != "" {
		if err := ensureTopic(ctx, client, *eventsTopic, admin.Normal, 8); err != nil {
			return err
		}
	}
	if err := safeOffsets(ctx, client, *group, *topic); err != nil {
		return err
	}
	conn, err := grpc.NewClient(*endpoints, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("proxy %s: %w", *endpoints, err)
	}
	defer conn.Close() //nolint:errcheck // the process ends
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		err := delayRoute(ctx, conn, *endpoints, *topic)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("route of topic %s at %s, asked for 30 s: %w", *topic, *endpoints, err)
		case <-tick.C:
		}
	}
}

// checkConfig reads back the settings without which timed messages get lost. The broker drops a line of broker.conf that it does not
// understand, a trailing blank is enough, and says nothing.
func checkConfig(ctx context.Context, client *admin.Client, precision string) error {
	config, err := client.BrokerConfig(ctx)
	if err != nil {
		return err
	}
	if err := admin.CheckSettings(config); err != nil {
		return fmt.Errorf("the broker has settings in force that lose timed messages, see configs/rocketmq/broker.conf: %w", err)
	}
	if got := config["timerPrecisionMs"]; got != precision {
		return fmt.Errorf("the broker has timerPrecisionMs=%q in force, want %q", got, precision)
	}
	return nil
}

// ensure creates what is missing. A topic of another type is refused: its messages would be lost by a change, so that is for a person.
func ensure(ctx context.Context, client *admin.Client, topic, group string) error {
	if err := ensureTopic(ctx, client, topic, admin.Delay, 8); err != nil {
		return err
	}
	_, err := client.Group(ctx, group)
	if errors.Is(err, admin.ErrNotFound) {
		err = client.CreateGroup(ctx, group, 16)
	}
	if err != nil {
		return err
	}
	// The second group reads the dead letters of the first; consumer.DeadLetterGroup gives the name. A dead letter of a group with N retries
	// arrives as attempt N+3: to a reader with fewer than N+2 retries the broker never gives it, but moves it on to the reader's own dead letters.
	reader := group + "-dlq"
	g, err := client.Group(ctx, reader)
	if errors.Is(err, admin.ErrNotFound) || err == nil && g.Retries < deadLetterRetries {
		err = client.CreateGroup(ctx, reader, deadLetterRetries)
	}
	return err
}

func ensureTopic(ctx context.Context, client *admin.Client, topic string, kind admin.TopicType, queues int) error {
	t, err := client.Topic(ctx, topic)
	switch {
	case errors.Is(err, admin.ErrNotFound):
		err = client.CreateTopic(ctx, topic, kind, queues)
	case err == nil && t.Type != kind:
		err = fmt.Errorf("topic %s is of type %s, want %s: delete it, or start from an empty store", topic, t.Type, kind)
	}
	return err
}

// ensureDoctor creates what lapse doctor sends its messages to, before anybody can look for it.
func ensureDoctor(ctx context.Context, client *admin.Client, topic, group string) error {
	if topic != "" {
		_, err := client.Topic(ctx, topic)
		if errors.Is(err, admin.ErrNotFound) {
			err = client.CreateTopic(ctx, topic, admin.Delay, 2)
		}
		if err != nil {
			return err
		}
	}
	if group != "" {
		_, err := client.Group(ctx, group)
		if errors.Is(err, admin.ErrNotFound) {
			err = client.CreateGroup(ctx, group, 16)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// deadLetterRetries are more than any group of ours has, so that a dead letter waits for its reader however often that fails.
const deadLetterRetries = 1000

// safeOffsets gives the group a place in every queue where it has none, or one that lies beyond the end. Left to itself, a group without
// offsets on a topic whose oldest file is gone gets the last message of each queue only, and one whose offsets outlived the topic's messages
// misses the first ones. Messages that it gets a second time are harmless.
func safeOffsets(ctx context.Context, client *admin.Client, group, topic string) error {
	offsets, err := client.Offsets(ctx, group, topic)
	if err != nil {
		return err
	}
	queues := unsafeQueues(offsets)
	if len(queues) == 0 {
		return nil
	}
	fmt.Printf("stack: broker: group %s starts at the oldest message of %d queues of %s\n", group, len(queues), topic)
	return client.ResetOffset(ctx, group, topic, time.Time{}, queues...)
}

func unsafeQueues(offsets []admin.QueueOffsets) []int {
	var queues []int
	for _, o := range offsets {
		if o.Max > 0 && o.Committed < 0 || o.Committed > o.Max {
			queues = append(queues, o.Queue)
		}
	}
	return queues
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
