package lapse_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"go.yaml.in/yaml/v3"

	"github.com/lapse-orders/lapse/configs"
)

// composeProject loads docker-compose.yml as Docker Compose does, with nothing but the example of .env.
func composeProject(t *testing.T) *types.Project {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{"docker-compose.yml"}, cli.WithEnvFiles(".env.example"), cli.WithDotEnv, cli.WithResolvedPaths(true), cli.WithProfiles([]string{"*"}))
	if err != nil {
		t.Fatal(err)
	}
	project, err := options.LoadProject(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return project
}

// once says that a service does its work and ends, as something else waits for: `up --wait` takes the end of any other for a failure.
func once(p *types.Project, name string) bool {
	for _, other := range p.Services {
		if other.DependsOn[name].Condition == types.ServiceConditionCompletedSuccessfully {
			return true
		}
	}
	return false
}

func ours(s types.ServiceConfig) bool { return strings.HasPrefix(s.Image, "lapse:") }

func memory(s types.ServiceConfig) int64 {
	if s.Deploy == nil || s.Deploy.Resources.Limits == nil {
		return 0
	}
	return int64(s.Deploy.Resources.Limits.MemoryBytes)
}

// laptop is what the containers may take together of 8 GB, with room for the engine, the desktop and a browser.
const laptop = 5900 << 20

// composeFaults says what is wrong with the project, service by service.
func composeFaults(p *types.Project, grace time.Duration) []string {
	var faults []string
	total := int64(0)
	for _, name := range slices.Sorted(maps.Keys(p.Services)) {
		s := p.Services[name]
		fault := func(format string, args ...any) { faults = append(faults, name+": "+fmt.Sprintf(format, args...)) }
		if once(p, name) {
			if s.Restart != "no" {
				fault(`restart is %q for what runs once, want "no"`, s.Restart)
			}
		} else {
			if s.HealthCheck == nil || s.HealthCheck.Disable || len(s.HealthCheck.Test) < 2 || s.HealthCheck.Test[0] != "CMD" {
				fault("no health check without a shell, and nothing waits for its end")
			} else if ours(s) && (len(s.HealthCheck.Test) != 4 || !slices.Equal(s.HealthCheck.Test[1:3], []string{"/lapse", "health"}) || s.HealthCheck.Test[3] != s.Command[0]) {
				fault("the health check %q does not ask %q", s.HealthCheck.Test, s.Command)
			}
			if s.Restart != "unless-stopped" {
				fault("restart is %q, want unless-stopped", s.Restart)
			}
			if s.StopGracePeriod == nil || time.Duration(*s.StopGracePeriod) <= grace {
				fault("stop_grace_period is not longer than shutdown.grace, %s", grace)
			}
		}
		if s.ContainerName != "" {
			fault("the container has the fixed name %s", s.ContainerName)
		}
		for _, port := range s.Ports {
			if port.HostIP != "127.0.0.1" {
				fault("port %s is published on %q, want 127.0.0.1", port.Published, port.HostIP)
			}
		}
		if s.GetScale() > 1 && len(s.Ports) > 0 {
			fault("a published port keeps it from having several replicas")
		}
		limit := memory(s)
		if limit == 0 {
			fault("no memory limit")
		}
		if !once(p, name) {
			total += limit * int64(s.GetScale())
		}
		if sizes := s.Environment["JAVA_SIZES"]; sizes != nil {
			if java := javaSizes(*sizes); java == 0 || java > limit*3/4 {
				fault("heap and direct memory (%q) are not within three quarters of the limit", *sizes)
			}
		}
		if ours(s) {
			if !s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Contains(s.SecurityOpt, "no-new-privileges:true") || s.Privileged || s.User != "" {
				fault("not as confined as it can be: read-only root, no capabilities, no new privileges, the image's own user")
			}
		} else if s.Build == nil && !regexp.MustCompile(`:\d`).MatchString(s.Image) {
			fault("the image %s has no version", s.Image)
		}
		for _, c := range s.Configs {
			if _, err := os.Stat(p.Configs[c.Source].File); err != nil {
				fault("config %s: %v", c.Source, err)
			}
		}
		for _, v := range s.Volumes {
			if _, named := p.Volumes[v.Source]; v.Type != types.VolumeTypeVolume || !named {
				fault("%s is kept in %q, want a named volume", v.Target, v.Source)
			}
		}
		for dependency, how := range s.DependsOn {
			if how.Condition == types.ServiceConditionStarted {
				fault("waits only for the start of %s", dependency)
			}
		}
	}
	if total > laptop {
		faults = append(faults, fmt.Sprintf("the limits sum up to %d MiB, want at most %d", total>>20, laptop>>20))
	}
	return faults
}

// javaSizes adds up the most that heap and direct memory may take.
func javaSizes(options string) int64 {
	var sum int64
	for _, m := range regexp.MustCompile(`(?:-Xmx|MaxDirectMemorySize=)(\d+)m`).FindAllStringSubmatch(options, -1) {
		n, err := strconv.ParseInt(m[1], 10, 64)
		if err != nil {
			return 0
		}
		sum += n << 20
	}
	return sum
}

// defaults gives default.yaml as a flat map, relay.tick and so on.
func defaults(t *testing.T) map[string]string {
	t.Helper()
	var sections map[string]any
	if err := yaml.Unmarshal(configs.Default, &sections); err != nil {
		t.Fatal(err)
	}
	flat := map[string]string{}
	var walk func(prefix string, section map[string]any)
	walk = func(prefix string, section map[string]any) {
		for k, v := range section {
			if below, ok := v.(map[string]any); ok {
				walk(prefix+k+".", below)
			} else {
				flat[prefix+k] = fmt.Sprint(v)
			}
		}
	}
	walk("", sections)
	return flat
}

func shutdownGrace(t *testing.T) time.Duration {
	t.Helper()
	grace, err := time.ParseDuration(defaults(t)["shutdown.grace"])
	if err != nil {
		t.Fatal(err)
	}
	return grace
}

func TestEveryServiceOfTheComposeFileIsSafeToRun(t *testing.T) {
	t.Parallel()
	p := composeProject(t)
	for _, fault := range composeFaults(p, shutdownGrace(t)) {
		t.Error(fault)
	}
	for _, name := range []string{"mysql", "mysql-replica", "namesrv", "broker", "proxy", "topics", "migrate", "api", "relay", "consumer", "reconcile", "refund"} {
		if _, ok := p.Services[name]; !ok {
			t.Errorf("there is no service %s", name)
		}
	}
	consumer := p.Services["consumer"]
	if n := consumer.GetScale(); n != 2 {
		t.Errorf("%d consumers, want 2", n)
	}
}

// What the test above holds is only worth something if it sees each fault.
func TestFaultsOfTheComposeFileAreSeen(t *testing.T) {
	t.Parallel()
	second := types.Duration(time.Second)
	for _, c := range []struct {
		service, want string
		spoil         func(*types.ServiceConfig)
	}{
		{"relay", "no health check", func(s *types.ServiceConfig) { s.HealthCheck = nil }},
		{"mysql", "no health check", func(s *types.ServiceConfig) { s.HealthCheck.Disable = true }},
		{"api", "does not ask", func(s *types.ServiceConfig) { s.HealthCheck.Test[3] = "relay" }},
		{"migrate", "runs once", func(s *types.ServiceConfig) { s.Restart = "always" }},
		{"broker", "want unless-stopped", func(s *types.ServiceConfig) { s.Restart = "" }},
		{"consumer", "stop_grace_period", func(s *types.ServiceConfig) { s.StopGracePeriod = &second }},
		{"consumer", "fixed name", func(s *types.ServiceConfig) { s.ContainerName = "consumer" }},
		{"proxy", "want 127.0.0.1", func(s *types.ServiceConfig) { s.Ports[0].HostIP = "" }},
		{"consumer", "several replicas", func(s *types.ServiceConfig) {
			s.Ports = []types.ServicePortConfig{{HostIP: "127.0.0.1", Published: "9871", Target: 9871}}
		}},
		{"relay", "no memory limit", func(s *types.ServiceConfig) { s.Deploy.Resources.Limits = nil }},
		{"mysql", "sum up to", func(s *types.ServiceConfig) { s.Deploy.Resources.Limits.MemoryBytes = 4 << 30 }},
		{"broker", "three quarters", func(s *types.ServiceConfig) {
			sizes := "-Xmx2048m"
			s.Environment["JAVA_SIZES"] = &sizes
		}},
		{"relay", "confined", func(s *types.ServiceConfig) { s.ReadOnly = false }},
		{"mysql", "no version", func(s *types.ServiceConfig) { s.Image = "mysql:latest" }},
		{"broker", "config nowhere", func(s *types.ServiceConfig) { s.Configs[0].Source = "nowhere" }},
		{"mysql", "want a named volume", func(s *types.ServiceConfig) { s.Volumes[0].Type = types.VolumeTypeBind }},
		{"proxy", "only for the start", func(s *types.ServiceConfig) {
			s.DependsOn["broker"] = types.ServiceDependency{Condition: types.ServiceConditionStarted}
		}},
	} {
		t.Run(c.service+" "+c.want, func(t *testing.T) {
			t.Parallel()
			p := composeProject(t)
			s := p.Services[c.service]
			c.spoil(&s)
			p.Services[c.service] = s
			faults := composeFaults(p, shutdownGrace(t))
			if len(faults) != 1 || !strings.Contains(faults[0], c.want) {
				t.Errorf("faults %q, want one with %q", faults, c.want)
			}
		})
	}
}

// Without passwords nothing starts: a default in the file would be one that everybody knows.
func TestTheComposeFileWantsItsPasswords(t *testing.T) {
	t.Parallel()
	example, err := os.ReadFile(".env.example")
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, m := range regexp.MustCompile(`(?m)^([A-Z_]+)=(.+)$`).FindAllStringSubmatch(string(example), -1) {
		all = append(all, m[1]+"="+m[2])
	}
	if len(all) < 9 {
		t.Fatalf(".env.example has %d values", len(all))
	}
	for i, left := range all {
		name, _, _ := strings.Cut(left, "=")
		options, err := cli.NewProjectOptions([]string{"docker-compose.yml"}, cli.WithEnv(slices.Delete(slices.Clone(all), i, i+1)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := options.LoadProject(t.Context()); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s it loads with %v, want an error that names it", name, err)
		}
	}
}

// The file repeats some of what configs/ says; the two must not part.
func TestTheComposeFileAgreesWithTheConfigurations(t *testing.T) {
	t.Parallel()
	p := composeProject(t)
	known := defaults(t)

	variables := map[string]bool{}
	for key := range known {
		variables["LAPSE_"+strings.ToUpper(strings.NewReplacer(".", "_").Replace(key))] = true
	}
	for name, s := range p.Services {
		for variable, value := range s.Environment {
			if ours(s) && strings.HasPrefix(variable, "LAPSE_") && (!variables[variable] || value == nil) {
				t.Errorf("%s: %s is no setting of lapse, or has no value", name, variable)
			}
		}
	}

	property := func(file, key string) string {
		t.Helper()
		text, err := os.ReadFile("configs/rocketmq/" + file)
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(`(?m)^` + key + `=(.*)$`).FindStringSubmatch(string(text))
		if m == nil {
			t.Fatalf("%s has no %s", file, key)
		}
		return m[1]
	}
	topics := strings.Join(p.Services["topics"].Command, " ") + " "
	for flag, want := range map[string]string{
		"topic":        known["rocketmq.topic"],
		"group":        known["rocketmq.group"],
		"doctor-topic": known["doctor.topic"],
		"doctor-group": known["doctor.group"],
		"events-topic": "order-events",
		"precision":    property("broker.conf", "timerPrecisionMs"),
		"broker":       "broker:" + property("broker.conf", "listenPort"),
		"endpoints":    "proxy:8081",
	} {
		if !strings.Contains(topics, "--"+flag+"="+want+" ") {
			t.Errorf("topics: %q has not --%s=%s", topics, flag, want)
		}
	}
	for name, want := range map[string]string{
		"namesrv": property("namesrv.conf", "listenPort"),
		"broker":  property("broker.conf", "listenPort"),
		"proxy":   "8081",
	} {
		if test := strings.Join(p.Services[name].HealthCheck.Test, " "); !strings.HasSuffix(test, "/127.0.0.1/"+want) {
			t.Errorf("%s: the health check %q does not ask port %s", name, test, want)
		}
	}

	// The proxy may be published under any number, since it gives clients back the address that they dialled.
	text, err := os.ReadFile("configs/rocketmq/rmq-proxy.json")
	if err != nil {
		t.Fatal(err)
	}
	var proxy struct {
		GRPCServerPort             int
		UseEndpointPortFromRequest bool
	}
	if err := json.Unmarshal(text, &proxy); err != nil {
		t.Fatal(err)
	}
	if !proxy.UseEndpointPortFromRequest || proxy.GRPCServerPort != 8081 {
		t.Errorf("rmq-proxy.json announces %+v; want the port that was dialled, and 8081 to listen on", proxy)
	}
}
